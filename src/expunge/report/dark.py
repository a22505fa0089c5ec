"""A picture for dark pages: the same drawing with its greys turned round and its colours made light enough."""

import re
from colorsys import hls_to_rgb, rgb_to_hls

CARD, INK = "#1f2225", "#e8e8e6"
"""What white and ink become; the page's own dark card and text."""
_LIGHT_INK = 0x22 / 255
_GREY = 0.12
"""Colours with less saturation than this are greys: paper, ink, lines."""
_LIGHTEST = 0.5
"""No colour is darker than this on the dark card."""
_COLOUR = re.compile(r"(?<=: )#[0-9a-f]{6}\b")


def in_dark(svg: str) -> str:
    """The drawing, as matplotlib writes it, for a dark page.

    Example:
        >>> in_dark('<path style="fill: #ffffff; stroke: #222222"/><use xlink:href="#abcdef"/>')
        '<path style="fill: #1f2225; stroke: #e8e8e6"/><use xlink:href="#abcdef"/>'
    """
    return _COLOUR.sub(lambda found: dark(found[0]), svg)


def dark(colour: str) -> str:
    """A colour's counterpart: black to white for greys, the same hue and the other lightness for the rest.

    Example:
        >>> dark("#004d40"), dark("#56b4e9")
        ('#b2fff2', '#1d9be2')
    """
    hue, lightness, saturation = rgb_to_hls(*_parts(colour))
    if saturation < _GREY:
        paper = max(0.0, (lightness - _LIGHT_INK) / (1 - _LIGHT_INK))
        return _written([paper * card + (1 - paper) * ink for card, ink in zip(_parts(CARD), _parts(INK), strict=True)])
    return _written(hls_to_rgb(hue, max(_LIGHTEST, 1 - lightness), saturation))


def _parts(colour: str) -> list[float]:
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def _written(parts: list[float] | tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)
