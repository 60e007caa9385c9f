"""Replays recorded actions with an environment's renderer into a GIF."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from broker.errors import UserError
from broker.settings.run_settings import RunSettings
from broker.system.private_files import draft_of
from envhub.demos import pick_domain
from envhub.envs.base import Frame, NotSupported, Split, StepResult, can_render

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

FRAME_MS: Final = 350
# before the picture starts again from the beginning
LAST_FRAME_MS: Final = 1500
LINE_PX: Final = 16
FONT_PX: Final = 12
MARGIN_PX: Final = 6
# a caption of about 35 characters
MIN_WIDTH_PX: Final = 240
# of the line that says how the episode ended
SOLVED_COLOUR: Final = "#1a7f37"
FAILED_COLOUR: Final = "#cf222e"


def write_gif(
    settings: RunSettings,
    domain: str | None,
    task_index: int,
    seed: int,
    actions: Sequence[str],
    out: str,
    *,
    split: Split = "eval",
    title: str = "",
) -> int:
    """Replay the actions, write one frame per state, and return the number of frames.

    Args:
        domain: None: the only one.
        task_index, seed, split: of the recorded episode.
        actions: the texts the policy sent, in order; those after the end of the episode are not
            played.
        out: path of the GIF.
        title: first line above the picture; the turn's action and its outcome follow.

    Raises:
        UserError: if the domain is unknown, its environment draws no pictures, or the file cannot
            be written.
    """
    selected_domain = pick_domain(settings, domain)
    if not can_render(selected_domain.environment):
        raise NotSupported(f"environment {selected_domain.environment.__name__} draws no pictures")
    environment = selected_domain.make()
    environment.reset(task_index, split, seed)
    pictures = [_captioned_picture(environment.render_frame(), [title, "start", ""], "black")]
    for turn, action in enumerate(actions, start=1):
        step: Any = environment.step(action)
        is_last = turn == len(actions)
        caption = [title, f"turn {turn}: {action}", outcome(step, is_last=is_last)]
        colour = _choose_colour(step, is_last=is_last)
        pictures.append(_captioned_picture(environment.render_frame(), caption, colour))
        if step.done:
            break
    environment.close()
    _save_gif(pictures, out)
    return len(pictures)


def outcome(step: StepResult, *, is_last: bool) -> str:
    """Return the outcome of an action in a few words."""
    parts = [f"reward {step.reward:+.3g}"]
    if not step.valid:
        parts.append("not a valid action")
    if step.success:
        parts.append("solved")
    elif step.done:
        parts.append("failed")
    elif is_last:
        parts.append("out of turns")
    return ", ".join(parts)


def _choose_colour(step: StepResult, *, is_last: bool) -> str:
    if step.success:
        return SOLVED_COLOUR
    return FAILED_COLOUR if step.done or is_last else "black"


def _captioned_picture(frame: Frame, caption: Sequence[str], colour: str) -> Image:
    """Return the picture below its caption, whose lines are cut to the picture's width.

    Args:
        colour: of the last line.
    """
    from PIL import Image, ImageDraw

    picture = Image.fromarray(frame)
    top = LINE_PX * len(caption) + MARGIN_PX
    width = max(picture.width, MIN_WIDTH_PX)
    whole = Image.new("RGB", (width, picture.height + top), "white")
    whole.paste(picture, ((width - picture.width) // 2, top))
    draw = ImageDraw.Draw(whole)
    draw.font = load_font()
    colours = ["black"] * (len(caption) - 1) + [colour]
    for number, line in enumerate(caption):
        text = _cut_text(draw, " ".join(line.split()), width - 2 * MARGIN_PX)
        place = (MARGIN_PX, MARGIN_PX // 2 + LINE_PX * number)
        draw.text(place, text, fill=colours[number])
    return whole


@cache
def load_font() -> FreeTypeFont:
    """Return the font of matplotlib's charts, which has the characters that Pillow's own lacks."""
    from matplotlib import get_data_path
    from PIL import ImageFont

    return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", FONT_PX)


def _cut_text(draw: ImageDraw, text: str, width_px: int) -> str:
    """Return the text, or as much of its beginning as fits with three dots behind it."""
    if draw.textlength(text) <= width_px:
        return text
    # A policy's action can have thousands of characters, too many to measure each beginning.
    num_fitting = bisect_right(
        range(len(text)),
        width_px,
        key=lambda length: math.ceil(draw.textlength(f"{text[:length]}...")),
    )
    return f"{text[: max(num_fitting - 1, 0)]}..."


def _save_gif(pictures: Sequence[Image], out: str) -> None:
    target = Path(out)
    durations = [FRAME_MS] * (len(pictures) - 1) + [LAST_FRAME_MS]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with draft_of(target) as draft:
            pictures[0].save(
                draft,
                format="GIF",
                save_all=True,
                append_images=pictures[1:],
                duration=durations,
                loop=0,
            )
    except OSError as error:
        raise UserError(f"{out}: {error.strerror or error}") from None
