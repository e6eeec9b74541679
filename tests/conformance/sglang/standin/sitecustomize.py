"""Lets SGLang start on a CPU machine, where some of its packages are missing; active only with SGLANG_STANDIN=cpu.

The GPU kernel package is absent, the registry's torchvision is a CUDA build, streams and pinned memory do not exist.
What is absent can be imported; calling it raises.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
import typing

ABSENT = {"sgl_kernel"}
HAS_A_FALLBACK = {"sgl_kernel.scalar_type"}
ASKED_FOR = {"fused_qk_norm_cpu", "fused_qk_norm_rope_cpu"}  # kernels that a model does without if they are not there


def any_schema(cls, source, handler):
    from pydantic_core import core_schema

    return core_schema.any_schema()


class AbsentModule(types.ModuleType):
    __path__: typing.ClassVar[list[str]] = []
    __version__ = "99.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            members = {
                "__init__": lambda self, *args, **kwargs: None,
                "__get_pydantic_core_schema__": classmethod(any_schema),
            }
            return type(name, (), members)

        def absent(*args, **kwargs):
            if len(args) == 1 and callable(args[0]) and not kwargs:
                return args[0]  # used as a decorator
            raise NotImplementedError(f"{self.__name__}.{name} does not exist on this machine")

        absent.__name__ = name
        return absent


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT and name not in HAS_A_FALLBACK:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return AbsentModule(spec.name)

    def exec_module(self, module):
        pass


class Before(importlib.abc.MetaPathFinder):
    """Calls a function once, right before the first import of a module."""

    def __init__(self, prefix, action):
        self.prefix, self.action = prefix, action

    def find_spec(self, name, path=None, target=None):
        if name.startswith(self.prefix):
            sys.meta_path.remove(self)
            self.action()


def declare_torchvision_ops():
    import torch

    torch._torchvision_ops = torch.library.Library("torchvision", "DEF")
    for op in ("nms", "qnms"):
        torch._torchvision_ops.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def declare_kernel_ops():
    """Kernels that models look up while they are imported; calling one raises."""
    import torch

    known = type(torch.ops.sgl_kernel)

    class Absent(known):
        def __getattr__(self, name):
            if not name.endswith("_cpu") or name in ASKED_FOR:
                return super().__getattr__(name)

            def absent(*args, **kwargs):
                raise NotImplementedError(f"torch.ops.sgl_kernel.{name} does not exist on this machine")

            return absent

    torch.ops.sgl_kernel.__class__ = Absent


def give_cpu_streams():
    """The canary stages its results over a stream and pinned memory."""
    import torch

    class Stream(torch.cpu.Stream):
        def __init__(self, *args, **kwargs):
            pass

        def wait_stream(self, *args):
            pass

        def synchronize(self):
            pass

        def record_event(self, event=None):
            return event

        def query(self):
            return True

    def unpinned(create):
        def created(*args, **kwargs):
            kwargs.pop("pin_memory", None)
            return create(*args, **kwargs)

        return created

    torch.cpu.Stream = Stream
    for name in ("empty", "zeros", "tensor"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


if os.environ.get("SGLANG_STANDIN") == "cpu":
    sys.meta_path.append(AbsentFinder())
    sys.meta_path.insert(0, Before("torchvision", declare_torchvision_ops))
    sys.meta_path.insert(0, Before("sglang.srt.layers.attention.linear", declare_kernel_ops))
    if os.environ.get("SGLANG_STANDIN_CANARY") == "1":
        sys.meta_path.insert(0, Before("sglang.srt.kv_canary", give_cpu_streams))
