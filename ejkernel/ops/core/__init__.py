"""What a kernel and a call are."""

from ejkernel.ops.core.kernel import Invocation as Invocation
from ejkernel.ops.core.kernel import Kernel as Kernel
from ejkernel.ops.core.types import Cfg as Cfg
from ejkernel.ops.core.types import Out as Out
