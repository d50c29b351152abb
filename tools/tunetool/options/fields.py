"""A dataclass whose fields are options and arguments of a command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any, TypeVar

import click

from tunetool.options.values import Value

OptionsT = TypeVar("OptionsT")
_KEY = "click"


def option(*names: str, **settings: Any) -> Any:
    """A field that is an option; ``settings`` are those of ``click.option``. ``--help`` shows a default.

    The field's own default is what the command line has without the option, so that Python code may leave it out.
    """
    if "default" in settings:
        settings.setdefault("show_default", True)
    make = functools.partial(click.option, *names, **settings)
    if settings.get("required"):
        return field(kw_only=True, metadata={_KEY: make})
    # A default in words is read when it is needed: its reader may load what a help text does not need.
    return field(kw_only=True, default_factory=functools.partial(_default, settings), metadata={_KEY: make})


def _default(settings: Mapping[str, Any]) -> Any:
    default, kind = settings.get("default"), settings.get("type")
    if settings.get("multiple"):
        return tuple(default or ())
    if default is None:
        return False if settings.get("is_flag") else None
    return kind.convert(default, None, None) if isinstance(kind, Value) else default


def repeatable(*names: str, **settings: Any) -> Any:
    """A field that is an option which may be given several times."""
    return option(*names, multiple=True, **settings)


def argument(metavar: str, **settings: Any) -> Any:
    """A field that is a positional argument."""
    make = functools.partial(click.argument, metavar=metavar, **settings)
    if settings.get("nargs") == -1 and not settings.get("required"):
        return field(kw_only=True, default=(), metadata={_KEY: make})
    return field(kw_only=True, metadata={_KEY: make})


def takes(options: type[OptionsT]) -> Callable[[Callable[[OptionsT], int]], Callable[..., int]]:
    """Let a command take ``options``, a dataclass; its ``check``, if it has one, is called first."""

    def decorate(function: Callable[[OptionsT], int]) -> Callable[..., int]:
        @functools.wraps(function)
        def called(**values: Any) -> int:
            given = options(**values)
            check = getattr(given, "check", None)
            if check is not None:
                check()
            return function(given)

        decorated: Callable[..., int] = called
        for each in reversed(_in_order(options)):
            make = each.metadata[_KEY]
            # The field's name is the parameter's, whatever the option is called.
            decorated = functools.partial(make.func, each.name, *make.args, **make.keywords)()(decorated)
        return decorated

    return decorate


def _in_order(options: type[Any]) -> list[Any]:
    """The fields of the class itself, then those of its bases."""
    by_name = {each.name: each for each in fields(options)}
    names = [name for base in options.__mro__ for name in vars(base).get("__annotations__", {})]
    return [by_name[name] for name in dict.fromkeys(names) if name in by_name]


def number(*names: str, least: int = 1, **settings: Any) -> Any:
    """A field that is an option with a whole number, not below ``least``."""
    return option(*names, type=click.IntRange(min=least), metavar="N", **settings)
