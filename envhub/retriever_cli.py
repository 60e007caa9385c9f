"""The command ``envhub retriever``: search as a process of its own."""

from __future__ import annotations

import argparse
import ipaddress
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aiohttp import web

from broker.errors import UserError
from broker.runtime.process import Stop
from broker.settings.arguments import ArgumentParser, complete, count, port
from broker.settings.secret import SecretRef
from envhub.envs.retrieval.encoder import EncoderOptions
from envhub.envs.retrieval.retriever import Retriever, WordRetriever, load_dense
from envhub.envs.retrieval.server import MAX_TOPK, RetrieverServer
from envhub.envs.tools.corpus import read_corpus

EXAMPLES: Final = {
    "envhub retriever": [
        "envhub retriever corpus.jsonl",
        (
            "envhub retriever wiki.jsonl --encoder intfloat/e5-base-v2 --query-prefix 'query: ' "
            "--passage-prefix 'passage: ' --index hnsw --store wiki.index"
        ),
    ]
}


def retriever_parser() -> argparse.ArgumentParser:
    """Return the parser of ``envhub retriever``."""
    parser = ArgumentParser(
        prog="envhub retriever",
        description="Serve the search of a corpus over HTTP, in the form of Search-R1.",
    )
    parser.add_argument("corpus", metavar="CORPUS", help="JSONL, one document per line")
    parser.add_argument("--text", default="contents", metavar="COLUMN", help="(%(default)s)")
    parser.add_argument("--title", default="title", metavar="COLUMN", help="(%(default)s)")
    text = "folder or hub name of an encoder; without one, words are compared (BM25)"
    parser.add_argument("--encoder", metavar="MODEL", help=text)
    text = "what a text's vector is: the mean over its tokens, or the first (%(default)s)"
    parser.add_argument("--pooling", choices=["mean", "cls"], default="mean", help=text)
    for name in ("query", "passage"):
        parser.add_argument(
            f"--{name}-prefix", default="", metavar="TEXT", help=f"put before each {name}"
        )
    text = "tokens of a text that the encoder reads (%(default)s)"
    parser.add_argument("--max-tokens", type=count, default=512, metavar="N", help=text)
    text = "exact, or a graph of usearch for many documents (%(default)s)"
    parser.add_argument("--index", choices=["exact", "hnsw"], default="exact", help=text)
    text = "folder that keeps the index, so that the next start does not encode again"
    parser.add_argument("--store", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--device", default="cpu", help="of the encoder (%(default)s)")
    text = "processor threads of encoder and index (%(default)s)"
    parser.add_argument("--threads", type=count, default=1, metavar="N", help=text)
    text = "documents per query, where a request does not say (%(default)s)"
    parser.add_argument("--topk", type=count, default=3, metavar="N", help=text)
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (%(default)s)")
    parser.add_argument("--port", type=port, default=8000, help="0: any free one (%(default)s)")
    text = "file with a key that requests must bring; needed beyond loopback"
    parser.add_argument("--api-key-file", metavar="FILE", help=text)
    return complete(parser, EXAMPLES)


def run_retriever(arguments: Sequence[str]) -> int:
    """Serve until a signal."""
    from broker.runtime import process

    options = retriever_parser().parse_args(arguments)
    return process.main("retriever", lambda stop: _serve(options, stop))


async def _serve(options: argparse.Namespace, stop: Stop) -> None:
    api_key = _read_key(options)
    if options.topk > MAX_TOPK:
        raise UserError(f"--topk {options.topk} is not allowed; at most {MAX_TOPK}")
    corpus = read_corpus(options.corpus, options.text, options.title)
    retriever: Retriever = WordRetriever(corpus)
    if options.encoder:
        retriever = load_dense(
            corpus, _encoder_options(options), options.index, options.store, options.threads
        )
    server = RetrieverServer(corpus, retriever, options.topk, api_key)
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, options.host, options.port)
        try:
            await site.start()
        except OSError as error:
            address = f"{options.host}:{options.port}"
            raise UserError(f"cannot listen at {address}: {error.strerror}") from None
        host, bound_port = runner.addresses[0][:2]
        url = f"http://{host}:{bound_port}"
        print(json.dumps({"url": url, "documents": len(corpus.texts)}), flush=True)
        logging.getLogger(__name__).info("serving %d documents at %s", len(corpus.texts), url)
        await stop.asked.wait()
    finally:
        await runner.cleanup()


def _encoder_options(options: argparse.Namespace) -> EncoderOptions:
    import torch

    torch.set_num_threads(options.threads)
    return EncoderOptions(
        options.encoder,
        options.pooling,
        options.query_prefix,
        passage_prefix=options.passage_prefix,
        max_tokens=options.max_tokens,
        device=options.device,
    )


def _read_key(options: argparse.Namespace) -> str:
    if options.api_key_file:
        return SecretRef(file=options.api_key_file).require("--api-key-file")
    try:
        is_loopback = ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        is_loopback = options.host == "localhost"
    if not is_loopback:
        raise UserError(f"--host {options.host} needs --api-key-file: others could ask")
    return ""
