"""Workers: run code separately from the caller's trace, or from its process."""

from ejkernel.ops.tuning.workers.process import JobCrashed as JobCrashed
from ejkernel.ops.tuning.workers.process import JobError as JobError
from ejkernel.ops.tuning.workers.process import JobOutOfMemory as JobOutOfMemory
from ejkernel.ops.tuning.workers.process import JobRaised as JobRaised
from ejkernel.ops.tuning.workers.process import JobTimedOut as JobTimedOut
from ejkernel.ops.tuning.workers.process import ProcessWorker as ProcessWorker
from ejkernel.ops.tuning.workers.thread import run_outside as run_outside
