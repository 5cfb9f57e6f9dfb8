"""Registers isotrain's own backends, by the hook that third-party plugins use."""

from __future__ import annotations

from isotrain.plugin import BackendRegistry, hookimpl

_BACKENDS = {
    "torch-ddp": "isotrain.adapters.torch.adapter:TorchDDP",
    "tf-mirrored": "isotrain.adapters.tensorflow.adapter:TFMirrored",
    "tf-multiworker": "isotrain.adapters.tensorflow.adapter:TFMultiWorker",
    "horovod-torch": "isotrain.adapters.horovod.torch_adapter:HorovodTorch",
    "horovod-tf": "isotrain.adapters.horovod.tf_adapter:HorovodTF",
}


@hookimpl
def isotrain_register_backends(register: BackendRegistry) -> None:
    """Registers each backend by reference, so that none is imported before it is used."""
    for name, reference in _BACKENDS.items():
        register.add(reference, name=name)
