"""Serve a model over HTTP in OpenAI's and vLLM's terms: /v1/chat/completions, /v1/completions, /tokenize, /metrics.

Each answer says what speculation did, as vLLM does (metrics.speculative_decoding). It listens on this machine alone;
any other address needs a key. Requests wait in a queue; there is no scheduler: those that wait start together.
"""

import argparse
import contextlib
import errno
import ipaddress
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specsparse.cli import arguments
from specsparse.cli.arguments import positive
from specsparse.engine import hosts
from specsparse.errors import UserError, pip_install
from specsparse.support import terminal
from specsparse.support.registry import Choice

if TYPE_CHECKING:
    from specsparse.engine.model import Model
    from specsparse.tools.serve.app import Service

KEY = "SPECSPARSE_API_KEY"
"""The environment variable that holds the key if --api-key is not given."""
_GRACE_S = 2  # for open answers, at the end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    arguments.add_distributed(parser.add_argument)
    arguments.add_method(parser)
    add = parser.add_argument
    add("--name", metavar="NAME", help="the model's name in requests (MODEL, of a file its name)")
    about = "the address to listen on; another machine's needs a key (%(default)s)"
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=about)
    add(
        "--port",
        type=arguments.whole(0, 65535),
        default=8000,
        metavar="N",
        help="the port; 0 takes a free one (%(default)s)",
    )
    add("--api-key", metavar="KEY", help=f"each request must give it; better in the environment, as {KEY}")
    add("--batch", type=positive, default=1, metavar="N", help="completions that may start together (%(default)s)")
    add("--queue", type=positive, default=32, metavar="N", help="requests that may wait; 503 beyond (%(default)s)")
    about = "latest texts whose keys and values stay, for conversations that go on; 0: none (%(default)s)"
    add("--prefix-caching", type=arguments.whole(0, 4096), default=1, metavar="N", help=about)
    about = "before it listens, compile the programs of the first requests"
    about += ": prompt and text of up to TOKENS tokens (%(const)s), or of the context"
    add("--warm-up", nargs="?", type=positive, const=512, metavar="TOKENS", help=about)
    fields = [name for name in arguments.ONE_TEXT if name not in ("stop", "stop_token_ids", "bad_words")]
    arguments.add_sampling(parser, fields, tokens=False)


def main(args: argparse.Namespace) -> int:
    arguments.settle(args)
    key = args.api_key if args.api_key is not None else os.environ.get(KEY)
    if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
        raise UserError("the API key must be ASCII letters, digits and signs: a header of HTTP carries nothing else")
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        how = pip_install("starlette", "uvicorn", "prometheus_client")
        raise UserError(f"{error.name} is not installed: {how}") from None
    chosen = arguments.method_of(args, arguments.sampling_params(args))
    chosen.arguments()
    with _listen(args.host, args.port, key) if hosts.leads() else contextlib.nullcontext() as listening:
        from specsparse.tools.serve.app import uvicorn_config

        service = _service(args, arguments.load(args, terminal.console()))
        if args.warm_up is not None:
            with terminal.busy(terminal.console(), "compiling what requests need"):
                service.warm_up(args.warm_up)
        if listening is None:
            service.worker.follow(service.spec_at)
            return 0
        address, port = listening.getsockname()[:2]
        config = uvicorn_config(service.app(key=key, local=key is None), grace_s=_GRACE_S)
        shown = f"[{address}]" if ":" in address else address
        method = f"drafter {chosen.drafter.name}" if isinstance(chosen.drafter, Choice) else "plain decoding"
        print(f"{service.name} at http://{shown}:{port}/v1 ({method}); Ctrl-C ends", file=sys.stderr, flush=True)
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def _listen(host: str, port: int, key: str | None) -> socket.socket:
    """The open socket; UserError for no such address, a taken port, or another machine's address without a key."""
    try:
        [family, _, _, _, address] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if key is None and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise UserError(f"--host {host} lets other machines in: give --api-key KEY, or {KEY} in the environment")
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]
        free = "; --port 0 takes a free one" if error.errno == errno.EADDRINUSE else ""
        raise UserError(f"--host {host}, port {port}: {why}{free}") from None


def _service(args: argparse.Namespace, model: "Model") -> "Service":
    """The model as it is served; a draft model is loaded here, so that its faults are said before a request comes."""
    from specsparse.engine.sampling.params import SamplingParams
    from specsparse.runtime.method import MethodSpec, ready
    from specsparse.tools.serve.app import Service

    defaults = arguments.sampling_params(args)
    spec = arguments.method_of(args, defaults)
    model, method = ready(spec, model)
    return Service(
        model,
        args.name or (Path(args.model).name.removesuffix(".gguf") if args.model.endswith(".gguf") else args.model),
        lambda temperature: MethodSpec(**replace(spec, sampling=SamplingParams(temperature=temperature)).arguments()),
        positions=None if method.drafter is None else method.max_nodes,
        defaults={name: getattr(defaults, name) for name in arguments.given_sampling(args)},
        batch=args.batch,
        room=args.queue,
        prefixes=args.prefix_caching,
    )
