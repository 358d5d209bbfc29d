"""Ready operations, built on `ejkernel.ops`."""

from ejkernel.modules.dot_product_attention import dot_product_attention as dot_product_attention
from ejkernel.modules.flash_attention import FlashAttention as FlashAttention
from ejkernel.modules.flash_attention import FlashAttentionConfig as FlashAttentionConfig
from ejkernel.modules.flash_attention import flash_attention as flash_attention
from ejkernel.modules.grouped_matmul import GroupedDrhs as GroupedDrhs
from ejkernel.modules.grouped_matmul import GroupedDrhsConfig as GroupedDrhsConfig
from ejkernel.modules.grouped_matmul import GroupedMatmul as GroupedMatmul
from ejkernel.modules.grouped_matmul import GroupedMatmulConfig as GroupedMatmulConfig
from ejkernel.modules.grouped_matmul import grouped_matmul as grouped_matmul
from ejkernel.modules.grouped_matmul import ragged_dot as ragged_dot
from ejkernel.modules.layer_norm import LayerNorm as LayerNorm
from ejkernel.modules.layer_norm import LayerNormConfig as LayerNormConfig
from ejkernel.modules.layer_norm import layer_norm as layer_norm
from ejkernel.modules.linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
from ejkernel.modules.linear_cross_entropy import LinearCrossEntropyConfig as LinearCrossEntropyConfig
from ejkernel.modules.linear_cross_entropy import LossGradients as LossGradients
from ejkernel.modules.linear_cross_entropy import LossGradientsConfig as LossGradientsConfig
from ejkernel.modules.linear_cross_entropy import LossStatistics as LossStatistics
from ejkernel.modules.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from ejkernel.modules.rms_norm import RmsNorm as RmsNorm
from ejkernel.modules.rms_norm import RmsNormConfig as RmsNormConfig
from ejkernel.modules.rms_norm import rms_norm as rms_norm
