"""Plays recorded actions through an environment's own renderer into a GIF."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from broker.errors import UserError
from envhub.demos import pick_domain
from envhub.envs.base import Frame, Split

if TYPE_CHECKING:
    from PIL.Image import Image

FRAME_MS: Final = 350
LAST_FRAME_MS: Final = 1500
BANNER_PX: Final = 24


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
    """Replay the actions and write one frame for each state; the number of frames.

    Args:
        config: a validated config.
        domain: None: the only one.
        task_index: the recorded episode's task.
        seed: the recorded episode's seed.
        actions: the texts the policy sent, in order; those after the end of the episode are not played.
        out: path of the GIF.
        split: the recorded episode's split.
        title: one line above the picture; the turn is added to it.

    Raises:
        UserError: unknown domain, an environment without pictures, or a file that cannot be written.
    """
    chosen = pick_domain(config, domain)
    environment = chosen.make()
    environment.reset(task_index, split, seed)
    pictures = [_picture(environment.render_frame(), title)]
    for turn, action in enumerate(actions, start=1):
        step: Any = environment.step(action)
        outcome = "" if not step.done else ", solved" if step.success else ", failed"
        pictures.append(_picture(environment.render_frame(), f"{title}  turn {turn}{outcome}".strip()))
        if step.done:
            break
    environment.close()
    _save(pictures, out)
    return len(pictures)


def _picture(frame: Frame, title: str) -> Image:
    from PIL import Image, ImageDraw

    picture = Image.fromarray(frame)
    banner = Image.new("RGB", (picture.width, picture.height + BANNER_PX), "white")
    banner.paste(picture, (0, BANNER_PX))
    ImageDraw.Draw(banner).text((4, 6), title.encode("ascii", "replace").decode(), fill="black")
    return banner


def _save(pictures: Sequence[Image], out: str) -> None:
    part = Path(f"{out}.part")
    durations = [FRAME_MS] * (len(pictures) - 1) + [LAST_FRAME_MS]
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        pictures[0].save(part, format="GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0)
        os.replace(part, out)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror or error}") from None
