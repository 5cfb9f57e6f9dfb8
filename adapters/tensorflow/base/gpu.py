"""GPUs of TensorFlow: the only module of a run that asks TensorFlow for them, or configures them."""

from __future__ import annotations

import tensorflow as tf

from isotrain.plugin import BackendConfig, PlanError, ProcessContext


def count() -> int:
    """Number of GPUs that TensorFlow sees."""
    return len(tf.config.list_physical_devices("GPU"))


def are_used() -> bool:
    """Whether this process computes on GPUs. Fixes the devices of the process."""
    return bool(tf.config.list_logical_devices("GPU"))


def use_local_gpu(backend_config: BackendConfig, context: ProcessContext) -> None:
    """Makes only the GPU of the local rank visible to this process, with memory growth.

    Raises:
        PlanError: There are fewer GPUs than processes on this host.
    """
    if backend_config.device == "cpu":
        return
    gpus = tf.config.list_physical_devices("GPU")
    if context.local_rank >= len(gpus):
        raise PlanError(
            f"process {context.rank} needs GPU {context.local_rank} of its host, and TensorFlow"
            f" sees only {len(gpus)}. Use at most one replica per GPU, or device: cpu."
        )
    tf.config.set_visible_devices(gpus[context.local_rank], "GPU")
    tf.config.experimental.set_memory_growth(gpus[context.local_rank], True)


def use_all() -> None:
    """Lets this process use all GPUs that it sees, with memory growth."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)


def use_none() -> None:
    """Hides all GPUs from this process."""
    tf.config.set_visible_devices([], "GPU")


def synchronize() -> None:
    """Waits for all that was queued on GPUs."""
    if are_used():
        tf.test.experimental.sync_devices()
