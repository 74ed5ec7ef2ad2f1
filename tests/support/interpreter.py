"""Triton's interpreter, without the work that it repeats at each call of a function."""

from __future__ import annotations

import dataclasses
import functools
import inspect


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
