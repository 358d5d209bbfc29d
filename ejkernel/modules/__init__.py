"""Ready operations, built on `ejkernel.ops`."""

from ejkernel.modules.flash_attention import FlashAttention as FlashAttention
from ejkernel.modules.flash_attention import FlashAttentionConfig as FlashAttentionConfig
from ejkernel.modules.flash_attention import flash_attention as flash_attention
