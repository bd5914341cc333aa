//! What a server hands over in one step: flat tokens, where each request starts, and the tokens
//! that came before.

use std::ops::Range;

use crate::error::{Error, Place, Result};

/// Integers as the caller keeps them.
#[derive(Debug, Clone, Copy)]
pub enum Ints<'a> {
    /// 32-bit signed.
    I32(&'a [i32]),
    /// 64-bit signed.
    I64(&'a [i64]),
}

impl Ints<'_> {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Self::I32(values) => values.len(),
            Self::I64(values) => values.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The value at `index`.
    #[inline]
    pub fn get(&self, index: usize) -> i64 {
        match self {
            Self::I32(values) => i64::from(values[index]),
            Self::I64(values) => values[index],
        }
    }
}

impl Ints<'_> {
    /// Copies the values from `start` on into `target`, which they must fill.
    pub(super) fn copy_to(&self, start: usize, target: &mut [i64]) {
        match self {
            Self::I32(values) => {
                for (value, target) in values[start..].iter().zip(target) {
                    *target = i64::from(*value);
                }
            }
            Self::I64(values) => target.copy_from_slice(&values[start..start + target.len()]),
        }
    }
}

impl<'a> From<&'a [i32]> for Ints<'a> {
    fn from(values: &'a [i32]) -> Self {
        Self::I32(values)
    }
}

impl<'a> From<&'a [i64]> for Ints<'a> {
    fn from(values: &'a [i64]) -> Self {
        Self::I64(values)
    }
}

/// Tokens before each request's first token of the step, oldest first: `rows` times `width` values.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// The values, row after row.
    pub values: Ints<'a>,
    /// Requests.
    pub rows: usize,
    /// Tokens per request.
    pub width: usize,
}

/// One step's tokens, checked: request `r` owns `tokens[query_start_loc[r]..query_start_loc[r + 1]]`.
///
/// Tokens past the last start belong to no request: they are padding, and their values are never
/// looked at.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    tokens: Ints<'a>,
    starts: Option<Ints<'a>>,
    context: Option<Context<'a>>,
    owned: usize,
}

impl<'a> Step<'a> {
    /// Checks that the parts fit together for a hash that looks `context_len` tokens back.
    ///
    /// Without `query_start_loc` all tokens are one request's; without `context` every request
    /// starts here.
    pub fn new(
        tokens: Ints<'a>,
        query_start_loc: Option<Ints<'a>>,
        context: Option<Context<'a>>,
        context_len: usize,
    ) -> Result<Self> {
        let owned = match query_start_loc {
            None => tokens.len(),
            Some(starts) => owned_tokens(starts, tokens.len())?,
        };
        let step = Self {
            tokens,
            starts: query_start_loc,
            context,
            owned,
        };
        if let Some(context) = context {
            if context.width != context_len {
                return Err(Error::value(format!(
                    "context has {} tokens per request, but this hash looks {context_len} back: \
                     pass the {context_len} tokens before each request, oldest first",
                    context.width
                )));
            }
            if context.rows != step.requests() {
                return Err(Error::value(format!(
                    "context has {} rows, but there are {} requests",
                    context.rows,
                    step.requests()
                )));
            }
            debug_assert_eq!(context.values.len(), context.rows * context.width);
        }
        Ok(step)
    }

    /// All tokens, padding included.
    pub fn tokens(&self) -> Ints<'a> {
        self.tokens
    }

    /// How many requests there are; some may own no token.
    pub fn requests(&self) -> usize {
        self.starts.map_or(1, |starts| starts.len() - 1)
    }

    /// Tokens that belong to requests; the rest is padding.
    pub fn owned(&self) -> usize {
        self.owned
    }

    /// Where the tokens of `request` lie.
    pub(super) fn range(&self, request: usize) -> Range<usize> {
        match self.starts {
            None => 0..self.owned,
            Some(starts) => start(starts, request)..start(starts, request + 1),
        }
    }

    /// The request that owns the token at `position`, which must be below [`Step::owned`].
    pub(super) fn request_of(&self, position: usize) -> usize {
        let (mut low, mut high) = (0, self.requests() - 1);
        while low < high {
            let middle = usize::midpoint(low, high);
            if self.range(middle).end > position {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        low
    }

    /// The context of `request`, if any was given.
    pub(super) fn context(&self, request: usize) -> Option<impl Fn(usize) -> i64 + use<'a>> {
        self.context
            .map(|context| move |column| context.values.get(request * context.width + column))
    }

    /// The refusal of the token at `position`.
    #[cold]
    pub(super) fn outside_token(&self, position: usize, request: usize, vocabulary: u64) -> Error {
        let token = self.tokens.get(position);
        let within = position - self.range(request).start;
        refusal(
            &format!(
                "token {token} at position {within} of request {request} (tokens[{position}])"
            ),
            vocabulary,
            Some(position),
        )
    }

    /// The refusal of a context entry of `request`.
    #[cold]
    pub(super) fn outside_context(&self, column: usize, request: usize, vocabulary: u64) -> Error {
        let token = self.context(request).map_or(0, |context| context(column));
        refusal(
            &format!("context token {token} of request {request} (context[{request}, {column}])"),
            vocabulary,
            None,
        )
    }
}

fn refusal(what: &str, vocabulary: u64, position: Option<usize>) -> Error {
    Error::Value {
        message: format!(
            "{what} is outside the vocabulary of {vocabulary}: put the real token there if this is \
             a placeholder, the hash's filler if nothing precedes, or choose out_of_vocab=\"wrap\" \
             to hash it as the engines do"
        ),
        place: Box::new(Place {
            position: position.and_then(|position| u64::try_from(position).ok()),
            ..Place::default()
        }),
    }
}

/// `starts` were checked to be positions, so the conversion cannot fail.
fn start(starts: Ints<'_>, index: usize) -> usize {
    usize::try_from(starts.get(index)).unwrap_or(0)
}

/// The last start, after checking that starts begin at 0, never decrease and stay inside.
fn owned_tokens(starts: Ints<'_>, tokens: usize) -> Result<usize> {
    if starts.is_empty() {
        return Err(Error::value(
            "query_start_loc is empty: it holds one start per request and the end of the last one",
        ));
    }
    if starts.get(0) != 0 {
        return Err(Error::value(format!(
            "query_start_loc[0] is {}: the first request starts at token 0",
            starts.get(0)
        )));
    }
    let mut previous = 0;
    for index in 1..starts.len() {
        let next = starts.get(index);
        if next < previous {
            return Err(Error::value(format!(
                "query_start_loc[{index}] is {next}, below query_start_loc[{}] = {previous}: \
                 starts never decrease",
                index - 1
            )));
        }
        previous = next;
    }
    usize::try_from(previous)
        .ok()
        .filter(|&owned| owned <= tokens)
        .ok_or_else(|| {
            Error::value(format!(
                "query_start_loc ends at {previous}, but there are only {tokens} tokens"
            ))
        })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(starts: &[i64], tokens: usize) -> String {
        let tokens = vec![0_i32; tokens];
        Step::new(Ints::I32(&tokens), Some(Ints::I64(starts)), None, 2)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn starts_that_do_not_describe_requests_are_refused() {
        assert!(message(&[], 3).contains("empty"));
        assert!(message(&[1, 3], 3).contains("query_start_loc[0] is 1"));
        assert!(
            message(&[0, 3, 2], 3)
                .contains("query_start_loc[2] is 2, below query_start_loc[1] = 3")
        );
        assert!(message(&[0, -1], 3).contains("below"));
        assert!(message(&[0, 4], 3).contains("ends at 4, but there are only 3 tokens"));
    }

    #[test]
    fn context_of_another_shape_is_refused() {
        let values = [0_i64; 6];
        let context = |rows, width| {
            Some(Context {
                values: Ints::I64(&values),
                rows,
                width,
            })
        };
        let refuse = |context| {
            Step::new(Ints::I64(&values), None, context, 2)
                .unwrap_err()
                .to_string()
        };
        assert!(refuse(context(2, 3)).contains("3 tokens per request, but this hash looks 2 back"));
        assert!(refuse(context(3, 2)).contains("3 rows, but there are 1 requests"));
    }

    proptest! {
        #[test]
        fn the_owner_of_a_token_is_the_request_whose_range_holds_it(
            lengths in prop::collection::vec(0_usize..4, 1..20), padding in 0_usize..5,
        ) {
            let mut starts = vec![0_i32];
            for &length in &lengths {
                starts.push(starts[starts.len() - 1] + i32::try_from(length).unwrap());
            }
            let owned: usize = lengths.iter().sum();
            let tokens = vec![0_i64; owned + padding];
            let step = Step::new(Ints::I64(&tokens), Some(Ints::I32(&starts)), None, 2).unwrap();
            prop_assert_eq!((step.requests(), step.owned()), (lengths.len(), owned));
            for position in 0..owned {
                prop_assert!(step.range(step.request_of(position)).contains(&position));
            }
        }
    }
}
