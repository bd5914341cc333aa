"""Text in, text out, from a model whose n-gram tables stay in the checkpoint's files.

    engram synth --model tiny/
    python examples/generate.py tiny/ "Once upon a time"

Runs the model with rows from files, then (unless --only-engram) the plain model with its tables in
memory, each in a process of its own; compares the texts and prints both peaks of memory.
`--engram-config '{"cpu_offload": true}'` puts the tables elsewhere. Works with every Qwen4-Exp
checkpoint that transformers loads; the weights of `engram synth --model` are random, and so is
their text.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path


def peak_bytes() -> int:
    """The most physical memory this process has had at once."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the kernel does not say VmHWM")


def run(
    path: str, prompt: str, tokens: int, *, plain: bool, config: str | None
) -> dict[str, object]:
    """Loads the model one way, lets it write, and says what that took."""
    import torch
    import transformers

    from engram.integrations.transformers import from_pretrained

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    if plain:
        model = transformers.AutoModelForImageTextToText.from_pretrained(path)
    else:
        model = from_pretrained(path, engram_config=config)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return {"text": tokenizer.decode(out[0]), "peak": peak_bytes(), "weights": weights}


def child(arguments: argparse.Namespace, how: str) -> dict[str, object]:
    """One way of running, in a new process: memory that was used once counts for ever."""
    command = [sys.executable, __file__, arguments.path, arguments.prompt, "--run", how]
    command += ["--tokens", str(arguments.tokens)]
    if arguments.engram_config is not None:
        command += ["--engram-config", arguments.engram_config]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def main() -> int:
    """Runs both ways and compares them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="checkpoint directory")
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to generate")
    parser.add_argument("--engram-config", help="where tables live, as JSON; files if left away")
    parser.add_argument("--only-engram", action="store_true", help="leave the plain model out")
    parser.add_argument("--run", choices=["engram", "plain"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        plain = arguments.run == "plain"
        given = (arguments.path, arguments.prompt, arguments.tokens)
        print(json.dumps(run(*given, plain=plain, config=arguments.engram_config)))
        return 0
    ways = ["engram"] if arguments.only_engram else ["engram", "plain"]
    found = {way: child(arguments, way) for way in ways}
    print(found["engram"]["text"])
    for way, result in found.items():
        peak, weights = (int(str(result[key])) / 2**20 for key in ("peak", "weights"))
        print(f"{way:>8}: peak {peak:9.1f} MiB, weights of the model {weights:9.1f} MiB")
    if len(found) == 2 and found["engram"]["text"] != found["plain"]["text"]:
        print("the two models wrote different texts", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
