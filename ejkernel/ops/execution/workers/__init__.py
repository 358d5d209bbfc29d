"""Workers: places to run what must not touch, or must not harm, the caller."""

from ejkernel.ops.execution.workers.process import JobCrashed as JobCrashed
from ejkernel.ops.execution.workers.process import JobError as JobError
from ejkernel.ops.execution.workers.process import JobOutOfMemory as JobOutOfMemory
from ejkernel.ops.execution.workers.process import JobRaised as JobRaised
from ejkernel.ops.execution.workers.process import JobTimedOut as JobTimedOut
from ejkernel.ops.execution.workers.process import ProcessWorker as ProcessWorker
from ejkernel.ops.execution.workers.thread import run_outside as run_outside
