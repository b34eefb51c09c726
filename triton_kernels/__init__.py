if __name__ != "amp_kernels.triton_kernels":
    raise ImportError(
        f"amp_kernels: this folder must be imported as amp_kernels.triton_kernels, got {__name__!r} "
        "(another project owns the import name triton_kernels). "
        "Install with `pip install --no-build-isolation -e .` and import amp_kernels; "
        "if you meant the other project, run Python in another directory"
    )

from .copy_pad import _copy_pad_
from .int8_conv2d import _int8_conv2d_
from .int8_dequantize import _dequantize_int8_, _straight_through_int8_
from .int8_matmul import _int8_linear_, _int8_matmul_
from .int8_quantize import _quantize_int8_
from .send import _send_
from .unscale import _load_unscale, _unscale_table_
from .update import _load_update, _update_table_

__all__ = [
    "_copy_pad_",
    "_dequantize_int8_",
    "_int8_conv2d_",
    "_int8_linear_",
    "_int8_matmul_",
    "_load_unscale",
    "_load_update",
    "_quantize_int8_",
    "_send_",
    "_straight_through_int8_",
    "_unscale_table_",
    "_update_table_",
]
