"""Replays recorded actions with an environment's renderer into a GIF."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from broker.errors import UserError
from broker.system.private_files import draft_of
from envhub.demos import pick_domain
from envhub.envs.base import Frame, NotSupported, Split, StepResult, can_render

if TYPE_CHECKING:
    from PIL.Image import Image

FRAME_MS: Final = 350
LAST_FRAME_MS: Final = 1500
LINE_PX: Final = 14
MARGIN_PX: Final = 6
MIN_WIDTH_PX: Final = 200  # a caption of about 35 characters


def write_gif(
    config: dict[str, Any],
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
        config: a validated config.
        domain: None: the only one.
        task_index, seed, split: of the recorded episode.
        actions: the texts the policy sent, in order; those after the end of the episode are not
            played.
        out: path of the GIF.
        title: first line above the picture; below it stand the turn's action and its outcome.

    Raises:
        UserError: if the domain is unknown, its environment draws no pictures, or the file cannot
            be written.
    """
    picked = pick_domain(config, domain)
    if not can_render(picked.environment):
        raise NotSupported(f"environment {picked.environment.__name__} draws no pictures")
    environment = picked.make()
    environment.reset(task_index, split, seed)
    pictures = [_picture(environment.render_frame(), [title, "start", ""])]
    for turn, action in enumerate(actions, start=1):
        step: Any = environment.step(action)
        caption = [
            title,
            f"turn {turn}: {' '.join(action.split())}",
            outcome(step, is_last=turn == len(actions)),
        ]
        pictures.append(_picture(environment.render_frame(), caption))
        if step.done:
            break
    environment.close()
    _save(pictures, out)
    return len(pictures)


def outcome(step: StepResult, *, is_last: bool) -> str:
    """Return the outcome of an action in a few words; after the last one the episode need not be
    over.
    """
    note = "" if step.valid else ", not a valid action"
    end = (
        ", solved"
        if step.success
        else ", failed"
        if step.done
        else ", out of turns"
        if is_last
        else ""
    )
    return f"reward {step.reward:+.3g}{note}{end}"


def _picture(frame: Frame, caption: Sequence[str]) -> Image:
    """Return the picture below its caption, whose lines are cut to the picture's width."""
    from PIL import Image, ImageDraw

    picture = Image.fromarray(frame)
    top = LINE_PX * len(caption) + MARGIN_PX
    width = max(picture.width, MIN_WIDTH_PX)
    whole = Image.new("RGB", (width, picture.height + top), "white")
    whole.paste(picture, ((width - picture.width) // 2, top))
    draw = ImageDraw.Draw(whole)
    for number, line in enumerate(caption):
        text = line.encode("ascii", "replace").decode()
        while text and draw.textlength(text) > width - 2 * MARGIN_PX:
            text = text[:-4] + "..." if text.endswith("...") else text[:-3] + "..."
        draw.text((MARGIN_PX, MARGIN_PX // 2 + LINE_PX * number), text, fill="black")
    return whole


def _save(pictures: Sequence[Image], out: str) -> None:
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
