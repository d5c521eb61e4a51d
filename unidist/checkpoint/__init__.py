"""The portable checkpoint: a directory of safetensors and JSON, never half written, read without running code.

    write("out/final", arrays, values)                 one checkpoint, replaced as a whole by the next write
    write("out/ckpt", arrays, values, step=120, keep=3)   a folder of them, step-000120, the last three kept
    read(path) -> Checkpoint(path, arrays, values)     also of such a folder (its newest), or a plain .safetensors file
    latest(folder) -> path | None

The names of arrays begin with a section, "model/0.weight": each section is a file of its own, and other tools read
model-….safetensors as it is. `fit` checks what was read against a model before anything in memory is touched.
"""

from unidist.checkpoint.names import compare, fit, strip_prefix
from unidist.checkpoint.reader import Checkpoint, latest, read
from unidist.checkpoint.writer import write

__all__ = ["Checkpoint", "compare", "fit", "latest", "read", "strip_prefix", "write"]
