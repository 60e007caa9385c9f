"""``rlearner tasks build``: images into layers that sandboxes of this host mount."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from broker.errors import UserError
from broker.settings.arguments import add_json
from broker.system.visible_text import visible_json


def add_build(commands: Any) -> None:
    """Add ``tasks build``."""
    text = (
        "turn image archives and Dockerfiles into layers for sandboxes; prints the digest of each, "
        "which a task's image may name"
    )
    parser = commands.add_parser("build", help=text, description=text)
    text = (
        "an archive or folder of an OCI image, an archive of docker save, a folder with a root "
        "file system (etc or bin in it), or a Dockerfile or its folder"
    )
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE", help=text)
    text = "the folder that a Dockerfile copies from (its own)"
    parser.add_argument("--context", type=Path, metavar="FOLDER", help=text)
    text = "where layers are kept (~/.local/state/rlearner/sandboxes)"
    parser.add_argument("--store", type=Path, metavar="FOLDER", help=text)
    text = "program that plays Dockerfiles: buildah or podman (the first that is installed)"
    parser.add_argument("--tool", default="", metavar="NAME", help=text)
    add_json(parser)
    parser.set_defaults(run=build_images)


def build_images(options: argparse.Namespace) -> int:
    """Build the images and print their digests.

    Raises:
        UserError: if a source is not an image, or a Dockerfile fails.
    """
    from rlearner_sandbox.providers.build import build_image
    from rlearner_sandbox.providers.namespace.provider import open_store

    store = open_store(options.store)
    digests = {}
    for source in options.sources:
        try:
            digest = build_image(source, store, context=options.context, tool=options.tool)
        except ValueError as error:
            raise UserError(str(error)) from None
        digests[str(source)] = digest
        if not options.json:
            print(f"{digest}  {source}", flush=True)
    if options.json:
        print(visible_json({"images": digests}))
    return 0
