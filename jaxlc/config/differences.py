"""The settings that differ from their defaults, as text and as HTML. Imports no jax."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxlc.config.models.model_schema import KindConfig
from jaxlc.config.schema import SourceConfig
from jaxlc.config.values import as_argument, defaults_of
from jaxlc.core.text import details, paragraph, preformatted, table

# (section, setting) -> the class of the parts with names that it contains.
NAMED_PARTS: dict[tuple[str, str], type] = {
    ("data", "mixture"): SourceConfig,
    ("model", "kinds"): KindConfig,
}
Values = Mapping[str, Mapping[str, Any]]  # section -> name -> value


def differences(values: Values, defaults: Values) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields (section, name, value, default) of each value that differs from its default."""
    for section, name, value, default in _all_values(values, defaults):
        if setting_text(value) != setting_text(default):
            yield section, name, value, default


def _all_values(values: Values, defaults: Values) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields (section, name, value, default) of each setting; the name is mixture.NAME.FIELD for
    those of a source.
    """
    for section, fields in defaults.items():
        for name, default in fields.items():
            value = values.get(section, {}).get(name)
            value = default if value is None else value
            if not isinstance(value, Mapping):
                yield section, name, value, default
                continue
            if (section, name) not in NAMED_PARTS:
                for field, field_default in default.items():
                    own = value.get(field)
                    yield (
                        section,
                        f"{name}.{field}",
                        field_default if own is None else own,
                        field_default,
                    )
                continue
            for part, set_fields in value.items():
                for field, field_default in defaults_of(NAMED_PARTS[section, name]).items():
                    yield (
                        section,
                        f"{name}.{part}.{field}",
                        set_fields.get(field, field_default),
                        field_default,
                    )


def setting_text(value: Any) -> str:
    """A value as it is written on the command line, an empty one as () or ''."""
    return as_argument(value) or ("''" if value == "" else "()")


def as_text(title: str, values: Values, defaults: Values) -> str:
    """One line per section that has differences."""
    lines: dict[str, list[str]] = {}
    for section, name, value, _ in differences(values, defaults):
        lines.setdefault(section, []).append(f"{name}={setting_text(value)}")
    if not lines:
        return f"{title}: all settings have their defaults"
    width = max(map(len, lines))
    body = [f"  {section:<{width}}  {' '.join(settings)}" for section, settings in lines.items()]
    return "\n".join([f"{title}: differences from the defaults", *body])


def as_html(title: str, values: Values, defaults: Values) -> str:
    """A table of the differences, and all settings of the sections in `values` in a collapsed
    block.
    """
    rows: list[tuple[str, str, str, str]] = []
    last_section = ""
    for section, name, value, default in differences(values, defaults):
        rows.append(
            (
                "" if section == last_section else section,
                name,
                setting_text(value),
                setting_text(default),
            )
        )
        last_section = section
    text = (
        f"{title}: differences from the defaults"
        if rows
        else f"{title}: all settings have their defaults"
    )
    header = ("section", "setting", "value", "default")
    summary = table(header, rows, caption=text) if rows else paragraph(text)
    shown = {section: fields for section, fields in defaults.items() if section in values}
    lines = [
        f"{section}.{name} = {setting_text(value)}"
        for section, name, value, _ in _all_values(values, shown)
    ]
    return summary + details(f"all {len(lines)} settings", preformatted("\n".join(lines)))
