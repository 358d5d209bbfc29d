"""Ready operations, built on `ejkernel.ops`."""

from ejkernel.modules.flash_attention import FlashAttention as FlashAttention
from ejkernel.modules.flash_attention import FlashAttentionConfig as FlashAttentionConfig
from ejkernel.modules.flash_attention import flash_attention as flash_attention
from ejkernel.modules.rms_norm import RmsNorm as RmsNorm
from ejkernel.modules.rms_norm import RmsNormConfig as RmsNormConfig
from ejkernel.modules.rms_norm import rms_norm as rms_norm
