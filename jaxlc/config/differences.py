"""The settings that differ from their defaults, as text and as HTML. Imports no jax."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxlc.config import mixture
from jaxlc.core import html

Values = Mapping[str, Mapping[str, Any]]  # section -> name -> value


def differences(values: Values, defaults: Values) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields (section, name, value, default) of each value that differs from its default."""
    for section, fields in defaults.items():
        for name, default in fields.items():
            value = values.get(section, {}).get(name, default)
            if setting_text(value) != setting_text(default):
                yield section, name, value, default


def setting_text(value: Any) -> str:
    """A value as it is written on the command line: lists with commas, an empty one as (). A mixture: the fields of its
    sources that differ from their defaults."""
    if isinstance(value, Mapping):
        return " ".join(f"{name}({_source_text(fields)})" for name, fields in value.items()) or "()"
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value)) or "()"
    return repr(value) if value == "" else str(value)


def _source_text(fields: Mapping[str, Any]) -> str:
    texts = {name: setting_text(value) for name, value in fields.items()}
    return " ".join(f"{name}={text}" for name, text in texts.items() if text != setting_text(mixture.DEFAULTS[name]))


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
    """A table of the differences, and all settings in a collapsed block."""
    rows: list[tuple[str, str, str, str]] = []
    last_section = ""
    for section, name, value, default in differences(values, defaults):
        rows.append(("" if section == last_section else section, name, setting_text(value), setting_text(default)))
        last_section = section
    if rows:
        summary = html.table(
            ("section", "setting", "value", "default"), rows, caption=f"{title}: differences from the defaults"
        )
    else:
        summary = html.paragraph(f"{title}: all settings have their defaults")
    lines = [
        f"{section}.{name} = {setting_text(values[section].get(name, default))}"
        for section in values
        for name, default in defaults[section].items()
    ]
    return summary + html.details(f"all {len(lines)} settings", html.preformatted("\n".join(lines)))
