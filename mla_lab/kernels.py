"""The door to the device code: `mla_lab.kernels.codec` is kernels/codec.py.

The folder kernels/ stands at the top level of a checkout and inside the package in a wheel. It has no __init__.py: with
one it would shadow the Hugging Face distribution `kernels`, which transformers looks for, as soon as the checkout's
root is on sys.path.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # modules of a folder that a type checker does not find
    def __getattr__(name: str) -> Any: ...

_here = Path(__file__).resolve().parent
_candidates = [_here / "kernels", _here.parent / "kernels"]
__path__ = [str(p) for p in _candidates if (p / "codec.py").is_file()][:1]
if not __path__:
    raise ImportError(f"device code not found: neither {_candidates[0]} nor {_candidates[1]} holds codec.py")
