//! `NgramHash`: the core's hashes under one Python class.

use std::sync::Arc;

use engram_core::hash::{
    Context, DeepSeek, DeepSeekConfig, EosRule, Hash, Ints, LongCat, LongCatConfig, OutOfVocab,
    Policy, Qwen, QwenConfig, Step,
};
use engram_core::threads;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::buffer::IdOutput;
use crate::errors::OrRaise as _;

/// Steps below this many ids are hashed on the calling thread, whatever the machine.
const SMALL_STEP: usize = 1 << 17;

/// Row ids of one table.
#[pyclass(frozen, module = "engram._engram")]
pub(crate) struct NgramHash {
    hash: Arc<dyn Hash>,
}

impl NgramHash {
    /// The hash itself.
    pub(crate) fn core(&self) -> &dyn Hash {
        &*self.hash
    }

    fn new(py: Python<'_>, hash: engram_core::Result<impl Hash + 'static>) -> PyResult<Self> {
        let hash = Arc::new(hash.or_raise(py)?);
        Ok(Self { hash })
    }
}

fn policy(wrap: bool, dead_id: Option<i64>) -> Policy {
    Policy {
        out_of_vocab: if wrap {
            OutOfVocab::Wrap
        } else {
            OutOfVocab::Refuse
        },
        dead_id,
    }
}

#[pymethods]
impl NgramHash {
    #[staticmethod]
    #[pyo3(signature = (
        *, vocab_size, ngram_size, heads_per_ngram, vocab_size_base, divisor, seed, ple_index, eos,
        wrap, dead_id,
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keywords, each a field of the configuration"
    )]
    fn qwen(
        py: Python<'_>,
        vocab_size: u64,
        ngram_size: usize,
        heads_per_ngram: usize,
        vocab_size_base: u64,
        divisor: u64,
        seed: u64,
        ple_index: usize,
        eos: u64,
        wrap: bool,
        dead_id: Option<i64>,
    ) -> PyResult<Self> {
        let config = QwenConfig {
            vocab_size,
            ngram_size,
            heads_per_ngram,
            vocab_size_base,
            divisor,
            seed,
            ple_index,
            eos,
        };
        Self::new(py, Qwen::new(&config, policy(wrap, dead_id)))
    }

    #[staticmethod]
    #[pyo3(signature = (
        *, layer_ids, layer, max_ngram, heads_per_order, vocab_sizes, pad_token, seed, token_map,
        image_token, demo, wrap, dead_id,
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keywords, each a field of the configuration"
    )]
    fn deepseek(
        py: Python<'_>,
        layer_ids: Vec<u64>,
        layer: u64,
        max_ngram: usize,
        heads_per_order: usize,
        vocab_sizes: Vec<u64>,
        pad_token: u64,
        seed: u64,
        token_map: &Bound<'_, PyAny>,
        image_token: Option<u64>,
        demo: bool,
        wrap: bool,
        dead_id: Option<i64>,
    ) -> PyResult<Self> {
        let (token_map, _) = Integers::read(py, token_map, "token_map")?;
        let values = token_map.values();
        let token_map = (0..values.len())
            .map(|token| {
                let id = values.get(token);
                u32::try_from(id).map_err(|_| {
                    PyValueError::new_err(format!(
                        "token_map[{token}] is {id}: compressed ids are 0..n"
                    ))
                })
            })
            .collect::<PyResult<Vec<u32>>>()?;
        let config = DeepSeekConfig {
            layer_ids,
            layer,
            max_ngram,
            heads_per_order,
            vocab_sizes,
            pad_token,
            seed,
            token_map,
            image_token,
            demo,
        };
        Self::new(py, DeepSeek::new(config, policy(wrap, dead_id)))
    }

    #[staticmethod]
    #[pyo3(signature = (
        *, vocab_size, valid_tokens, base_size, ngram, splits, eos, ignored, vllm, wrap, dead_id,
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keywords, each a field of the configuration"
    )]
    fn longcat(
        py: Python<'_>,
        vocab_size: u64,
        valid_tokens: u64,
        base_size: u64,
        ngram: usize,
        splits: usize,
        eos: u64,
        ignored: Vec<u64>,
        vllm: bool,
        wrap: bool,
        dead_id: Option<i64>,
    ) -> PyResult<Self> {
        let config = LongCatConfig {
            vocab_size,
            valid_tokens,
            base_size,
            ngram,
            splits,
            eos,
            eos_rule: if vllm {
                EosRule::Vllm
            } else {
                EosRule::HuggingFace
            },
            ignored,
        };
        Self::new(py, LongCat::new(&config, policy(wrap, dead_id)))
    }

    #[getter]
    fn heads(&self) -> usize {
        self.hash.heads().count()
    }

    #[getter]
    fn context_len(&self) -> usize {
        self.hash.context_len()
    }

    #[getter]
    fn filler(&self) -> i64 {
        self.hash.filler()
    }

    #[getter]
    fn vocab_size(&self) -> u64 {
        self.hash.vocabulary()
    }

    #[getter]
    fn multipliers(&self) -> Vec<Vec<i64>> {
        self.hash.multipliers()
    }

    #[getter]
    fn head_sizes(&self) -> Vec<u64> {
        self.hash.heads().sizes().to_vec()
    }

    #[getter]
    fn head_offsets(&self) -> Vec<u64> {
        self.hash.heads().offsets().to_vec()
    }

    #[getter]
    fn num_rows(&self) -> u64 {
        self.hash.heads().rows()
    }

    #[getter]
    fn padded_rows(&self) -> u64 {
        self.hash.heads().padded_rows()
    }

    #[pyo3(signature = (tokens, query_start_loc, context, out, threads=None))]
    fn ids(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        query_start_loc: Option<&Bound<'_, PyAny>>,
        context: Option<&Bound<'_, PyAny>>,
        out: &Bound<'_, PyAny>,
        threads: Option<usize>,
    ) -> PyResult<()> {
        let step = Inputs::read(py, tokens, query_start_loc, context)?;
        let step = step.step(self.hash.context_len()).or_raise(py)?;
        let mut out = IdOutput::new(out)?;
        let ids = out.ids();
        py.detach(|| {
            let threads = threads.unwrap_or_else(|| threads_for(ids.len()));
            self.hash.ids(&step, ids, threads)
        })
        .or_raise(py)
    }

    fn __repr__(&self) -> String {
        format!(
            "NgramHash(heads={}, num_rows={})",
            self.hash.heads().count(),
            self.hash.heads().rows()
        )
    }
}

/// A copy of a caller's int32 or int64 values. Being a copy, it stays what was checked whatever other
/// threads write to the original meanwhile.
enum Integers {
    I32(Vec<i32>),
    I64(Vec<i64>),
}

impl Integers {
    /// Copies the buffer of `object`, an argument called `name`; its shape comes along.
    fn read(py: Python<'_>, object: &Bound<'_, PyAny>, name: &str) -> PyResult<(Self, Vec<usize>)> {
        let buffer = PyUntypedBuffer::get(object)
            .map_err(|error| PyTypeError::new_err(format!("{name}: {error}")))?;
        let shape = buffer.shape().to_vec();
        let wrong = |_| PyTypeError::new_err(format!("{name} does not hold int32 or int64"));
        let values = if buffer.item_size() == size_of::<i32>() {
            Self::I32(buffer.into_typed::<i32>().map_err(wrong)?.to_vec(py)?)
        } else {
            Self::I64(buffer.into_typed::<i64>().map_err(wrong)?.to_vec(py)?)
        };
        Ok((values, shape))
    }

    fn values(&self) -> Ints<'_> {
        match self {
            Self::I32(values) => Ints::I32(values),
            Self::I64(values) => Ints::I64(values),
        }
    }
}

/// What a caller passes of a step.
pub(crate) struct Inputs {
    tokens: Integers,
    starts: Option<Integers>,
    /// With rows and width.
    context: Option<(Integers, [usize; 2])>,
}

impl Inputs {
    pub(crate) fn read(
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        query_start_loc: Option<&Bound<'_, PyAny>>,
        context: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let starts = query_start_loc
            .map(|starts| Integers::read(py, starts, "query_start_loc"))
            .transpose()?;
        let context = match context {
            None => None,
            Some(context) => {
                let (values, shape) = Integers::read(py, context, "context")?;
                let shape = <[usize; 2]>::try_from(&shape[..]).map_err(|_| {
                    PyValueError::new_err(format!(
                        "context has {} axes, not [requests, context_len]",
                        shape.len()
                    ))
                })?;
                Some((values, shape))
            }
        };
        Ok(Self {
            tokens: Integers::read(py, tokens, "tokens")?.0,
            starts: starts.map(|(starts, _)| starts),
            context,
        })
    }

    pub(crate) fn step(&self, context_len: usize) -> engram_core::Result<Step<'_>> {
        let context = self
            .context
            .as_ref()
            .map(|(values, [rows, width])| Context {
                values: values.values(),
                rows: *rows,
                width: *width,
            });
        let starts = self.starts.as_ref().map(Integers::values);
        Step::new(self.tokens.values(), starts, context, context_len)
    }
}

/// Threads this process may use, asked for only when a step is long enough for more than one.
pub(crate) fn threads_for(ids: usize) -> usize {
    if ids < SMALL_STEP {
        return 1;
    }
    threads::available()
}
