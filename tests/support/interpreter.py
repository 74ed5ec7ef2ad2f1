"""Triton's interpreter, without the work that it repeats, and with sums that GPUs make."""

from __future__ import annotations

import dataclasses
import functools
import inspect

import numpy as np


def patch_language_once() -> None:
    """At a launch the interpreter puts functions of its own in place of those of triton.language,
    and does so again at each call of a @triton.jit function inside, which changes nothing and
    takes half of its time. Let it do so once a launch. Another Triton than this was written for is
    left as it is."""
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    patch = getattr(interpreter, "_patch_lang", None)
    nothing = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or not hasattr(nothing, "restore"):
        return
    replaced: frozenset[str] = frozenset()  # which of the two modules, at this moment

    @functools.cache
    def seen_by(fn) -> frozenset[str]:
        """The modules that `patch` looks for in what a function sees."""
        modules = filter(inspect.ismodule, fn.__globals__.values())
        return frozenset(m.__name__ for m in modules if m in (language, language.core))

    def patch_once(fn):
        nonlocal replaced
        before, wanted = replaced, seen_by(fn)
        if wanted and wanted <= before:
            return nothing()
        scope = patch(fn)
        replaced |= wanted
        restore = scope.restore

        def restore_all() -> None:  # of a launch, and so of the functions that it called
            nonlocal replaced
            restore()
            replaced = before

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_once


def drop_unread_checks() -> None:
    """Every sum and product of integers is computed in 64 bits once more, for an assertion that is
    dropped unless the interpreter's options ask to debug."""
    try:
        from triton.runtime.interpreter import interpreter_builder as builder
    except ImportError:
        return
    options = getattr(builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and getattr(options, "debug", None) is False:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def multiply_rows_alike() -> None:
    """A BLAS may add the products of a row in an order that depends on where the row stands in its
    tile (OpenBLAS's kernels for AMD Zen do), and GPUs do not. Let the interpreter multiply in fp64
    and round once, so that the bits of a row are the same anywhere."""
    try:
        from triton.language import float64
        from triton.runtime import interpreter
    except ImportError:
        return
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain = builder.create_dot

    def create_dot(self, a, b, d, *rest):
        if d.data.dtype != np.float32:
            return plain(self, a, b, d, *rest)
        exact = plain(self, a, b, handle(d.data.astype(np.float64), float64), *rest)
        return handle(exact.data.astype(np.float32), d.dtype.scalar)

    builder.create_dot = create_dot


def remember_types() -> None:
    """Each operation makes the types and shapes of its result anew, from the same few: a third of
    the interpreter's time. Let it look up the parts that say the same of all, which nothing
    changes. Another Triton than this was written for is left as it is."""
    try:
        from triton.language import core
        from triton.runtime import interpreter

        plain = interpreter._get_np_dtype
        block_init, tensor_init = core.block_type.__init__, core.tensor.__init__
    except (ImportError, AttributeError):
        return
    parts: dict[tuple, tuple] = {}  # of a block type: shape, numel, name
    shapes: dict[str, tuple] = {}  # of a tensor, by its type's name: shape, numel
    of_numpy: dict[str, object] = {}

    def init_block(self, element_ty, shape):
        key = element_ty.name, *[getattr(size, "value", size) for size in shape]
        found = parts.get(key)
        if found is None:
            block_init(self, element_ty, shape)
            parts[key] = self.shape, self.numel, self.name
            return
        self.element_ty = element_ty
        self.shape, self.numel, self.name = found

    def init_tensor(self, handle, type):
        found = shapes.get(type.name)
        if found is None:
            tensor_init(self, handle, type)
            shapes[type.name] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found

    def np_dtype(tt_dtype):
        element = tt_dtype.element_ty if isinstance(tt_dtype, core.block_type) else tt_dtype
        found = of_numpy.get(element.name)
        if found is None:
            found = of_numpy[element.name] = plain(tt_dtype)
        return found

    def told() -> str:
        block = core.block_type(core.float32, [core.constexpr(4), 8])
        some = (block, core.tensor(None, block), core.tensor(None, core.int1))
        found = [sorted(vars(each).items(), key=lambda item: item[0]) for each in some]
        return str([[(name, str(value)) for name, value in each] for each in found])

    before = told()
    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    if before != told() or before != told():
        core.block_type.__init__, core.tensor.__init__ = block_init, tensor_init
    pointers = core.pointer_type(core.float32)
    for each in (core.bfloat16, core.int64, pointers, core.block_type(pointers, [4])):
        if plain(each) != np_dtype(each):
            return
    interpreter._get_np_dtype = np_dtype
