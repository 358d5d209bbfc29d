"""Records (dataclasses, NamedTuples, pydantic models) converted to fields and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from ejkernel.errors import EjkernelError
from ejkernel.ops.utils import classes

# What the constructor of a user's class may raise when it refuses its fields.
_REFUSALS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, AssertionError, EjkernelError)


class ConfigMismatchError(EjkernelError, ValueError):
    """Stored data no longer fits the config class it was written from."""


class UnknownClassError(ConfigMismatchError):
    """The class of stored data is not loaded, and reading must not load it."""


def fields_of(record: Any) -> dict[str, Any]:
    """Fields of a record with their values, in order."""
    if dataclasses.is_dataclass(record):
        return {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if hasattr(record, f.name)}
    if classes.is_namedtuple(type(record)):
        return dict(zip(record._fields, record, strict=True))
    return {name: getattr(record, name) for name in type(record).model_fields} | (record.model_extra or {})


def get(cfg: Any, path: str) -> Any:
    """A field of a config, its name dotted for nested ones; the config itself for the empty name."""
    for name in filter(None, path.split(".")):
        cfg = cfg[name] if isinstance(cfg, Mapping) else getattr(cfg, name)
    return cfg


def build(cls: type, values: Mapping[str, Any], where: str, hints: Mapping[str, Any]) -> Any:
    """Makes a `cls` of `values`, each checked against its hint; a missing field gets its default.

    Raises:
      ConfigMismatchError: A field is unknown, missing without a default, of another type, or refused by the class.
    """
    _check_names(cls, values, where)
    fitted = {name: _fit(hints[name], v, f"{where}.{name}") if name in hints else v for name, v in values.items()}
    try:
        return _construct(cls, fitted)
    except _REFUSALS as e:
        raise ConfigMismatchError(f"{where}: {classes.name_of(cls)} refuses {fitted!r}: {e}") from e


def _check_names(cls: type, values: Mapping[str, Any], where: str) -> None:
    required, known = _names(cls)
    if gone := [name for name in values if known is not None and name not in known]:
        raise ConfigMismatchError(f"{where}: {classes.name_of(cls)} no longer has the field(s) {', '.join(gone)}.")
    if missing := [name for name in required if name not in values]:
        raise ConfigMismatchError(
            f"{where}: {classes.name_of(cls)} needs {', '.join(missing)}, which the stored config lacks. "
            "Give a new field a default to keep older entries."
        )


def _names(cls: Any) -> tuple[list[str], frozenset[str] | None]:
    """Fields that must be given, and all that may be (None: any)."""
    if dataclasses.is_dataclass(cls):
        fields = dataclasses.fields(cls)
        unset = dataclasses.MISSING
        required = [f.name for f in fields if f.init and f.default is unset and f.default_factory is unset]
        return required, frozenset(f.name for f in fields)
    if classes.is_namedtuple(cls):
        return [name for name in cls._fields if name not in cls._field_defaults], frozenset(cls._fields)
    required = [name for name, field in cls.model_fields.items() if field.is_required()]
    return required, None if cls.model_config.get("extra") == "allow" else frozenset(cls.model_fields)


def _construct(cls: Any, values: dict[str, Any]) -> Any:
    if classes.is_model(cls):
        return cls.model_validate({_input_name(cls, name): v for name, v in values.items()})
    if not dataclasses.is_dataclass(cls):
        return cls(**values)
    record = _new_dataclass(cls, values)
    for name, value in values.items():
        # Derived fields (init=False), and those that __post_init__ would change a second time.
        if getattr(record, name, dataclasses.MISSING) is not value:
            object.__setattr__(record, name, value)
    return record


def _new_dataclass(cls: Any, values: Mapping[str, Any]) -> Any:
    fields = dataclasses.fields(cls)
    # The constructor is used, because it validates; one with arguments that are not stored cannot be called.
    if cls.__dataclass_params__.init and not _init_only(cls):
        return cls(**{f.name: values[f.name] for f in fields if f.init and f.name in values})
    record = cls.__new__(cls)
    for f in fields:
        if f.default_factory is not dataclasses.MISSING:
            object.__setattr__(record, f.name, f.default_factory())
        elif f.default is not dataclasses.MISSING:
            object.__setattr__(record, f.name, f.default)
    return record


def _init_only(cls: Any) -> bool:
    """Whether the constructor of a dataclass takes InitVars."""
    return any("_FIELD_INITVAR" in repr(f._field_type) for f in cls.__dataclass_fields__.values())


def _input_name(cls: Any, name: str) -> str:
    """The key under which a pydantic model takes a field."""
    field = cls.model_fields.get(name)
    by_name = cls.model_config.get("populate_by_name") or cls.model_config.get("validate_by_name")
    if field is None or by_name:
        return name
    alias = field.validation_alias or field.alias
    choices = [alias, *getattr(alias, "choices", ())]
    return next((choice for choice in choices if isinstance(choice, str)), name)


def _fit(hint: Any, value: Any, where: str) -> Any:
    """`value` as its declared type, through pydantic; unchanged if the type cannot be checked."""
    if classes.is_record(hint):
        if isinstance(value, hint):
            return value
        raise ConfigMismatchError(f"{where}: must be a {classes.name_of(hint)}, got {value!r}.")
    validate = _validator(hint) if getattr(hint, "__hash__", None) else None
    if validate is None:
        return value
    import pydantic

    try:
        fitted = validate(value)
    except pydantic.ValidationError as e:
        reason = "; ".join(error["msg"] for error in e.errors(include_url=False))
        raise ConfigMismatchError(f"{where}: {value!r} is not a {hint}: {reason}.") from e
    except TypeError:  # A hint that isinstance() cannot check, such as a Protocol.
        return value
    # An int in a float field stays the int that was stored.
    same_number = isinstance(value, int | float) and isinstance(fitted, int | float) and value == fitted
    return value if same_number else fitted


@functools.lru_cache(maxsize=4096)
def _validator(hint: Any) -> Callable[[Any], Any] | None:
    import pydantic

    try:
        adapter = pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
        return adapter.validator.validate_python  # If a name in the hint is unknown, looking it up raises.
    except (pydantic.PydanticUserError, NameError, TypeError, AttributeError):
        return None
