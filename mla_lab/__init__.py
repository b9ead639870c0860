"""mla-lab: a workbench for fp8 sparse multi-head latent attention.

    from mla_lab import sparse_mla_fwd, cache, inputs, reference

One call, `sparse_mla_fwd`, runs the published kernel's numerics (gfx942, gfx950 or sm_90) on whatever machine
this is: in a Triton kernel where there is a GPU, in an emulator where there is none.
"""

__version__ = "0.1.0"

from mla_lab import operator as operator  # registers torch.ops.mla_lab.sparse_mla_fwd
from mla_lab.attention import merge_parts, sparse_mla_fwd
from mla_lab.collect import results
from mla_lab.flashmla import flash_mla_sparse_fwd
from mla_lab.recipe import Recipe

__all__ = ["Recipe", "__version__", "flash_mla_sparse_fwd", "merge_parts", "results", "sparse_mla_fwd"]
