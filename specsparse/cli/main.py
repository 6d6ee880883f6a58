"""Finds the command, parses its arguments, and turns a mistake into one line and exit code 2."""

import argparse
import difflib
import importlib
import itertools
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NoReturn

from specsparse.engine import hosts
from specsparse.errors import UserError, fail, not_installed
from specsparse.support.files import git_commit
from specsparse.support.neighbours import FLAGS, answer
from specsparse.support.options import shown
from specsparse.support.terminal import until_the_reader_leaves

COMMANDS = {
    "advise": "should I speculate at all? Predicted speed-ups, here or on a device on paper; no weights needed",
    "audit": "does a verification of n rows give the bits of one row, here and in llama.cpp; where two texts fork",
    "bench": "measure prompt processing, decoding, v(n) and memory bandwidth, beside the peers",
    "certify": "does a verifier keep the target's distribution? Your function, in numpy or torch, or one of ours",
    "chat": "talk with a model by any method, its tokens coloured by where they came from",
    "convert": "make GGUF files of checkpoints, of llama2.c and for PowerInfer, quantise them, set metadata",
    "generate": "continue a prompt by any method; text as it comes, or JSON",
    "inspect": "what a model file is, what it costs, and how two files fit as target and draft",
    "models": "the models that have a name: whether they are here, their size, what they could do here",
    "profile": "time per stage and per kernel, and a trace for Perfetto",
    "replay": "the acceptance of other verifiers, lengths and temperatures on a recorded run",
    "report": "one HTML page about finished runs, with figures and CSV; or two runs side by side",
    "run": "run an experiment: the same as python -m specsparse.run",
    "serve": "answer OpenAI's requests over HTTP by any method, with vLLM's figures of speculation",
    "status": "which kernels run here and why, and what this machine is",
    "version": "version and commit",
}
"""Name -> its line in the list of commands. Only the module of the command that is called is imported."""
TOOLS = ("advise", "audit", "bench", "chat", "inspect", "profile", "replay", "serve")
"""Commands that are a package of `specsparse.tools`; the others are modules of `specsparse.cli`."""
REWRITING = ("audit", "bench")
"""Tools with a default sub-command: their `rewritten` puts it in front."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the nearest option."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word, known = unknown.split()[0], list(self._option_string_actions)
            flag = word.partition("=")[0]
            cutoff = 0.7 if word.startswith("--") else 0.75  # two of three letters are not near
            names, bare = {name.lstrip("-"): name for name in known}, flag.lstrip("-")  # "--" is like any other "--"
            near = [names[name] for name in difflib.get_close_matches(bare, names, n=1, cutoff=cutoff)]
            said = answer(FLAGS.get(f"-{bare}", bare.replace("-", "_")), at="command") if flag != bare else ""
            message = f"unknown argument {word}" + (f"; {said or f'did you mean {near[0]}?'}" if said or near else "")
        message = re.sub(r"\S{61,}", lambda word: shown(word[0]), message)
        raise UserError(f"{message} ({self.prog} --help shows all)")

    def parse_known_args(self, args=None, namespace=None):
        """As argparse's, but -ngl is an unknown flag and not -n with the value gl."""
        words = () if self._subparsers else args or ()
        for word in itertools.takewhile(lambda word: word != "--", words):
            flag = word.partition("=")[0]
            if re.fullmatch("-[a-z]{2,}", flag) and flag not in self._option_string_actions:
                self.error(f"unrecognized arguments: {word}")
        return super().parse_known_args(args, namespace)

    def add_subparsers(self, **options: Any):  # pyrefly: ignore[bad-override]  # argparse's stub has no such signature
        return super().add_subparsers(parser_class=SubParser, **options)


class SubParser(Parser):
    def parse_known_args(self, args=None, namespace=None):
        """As argparse's, but nothing may be left: so a sub-command names the nearest of its own options."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 2 after a mistake in the input, or the command's own."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug, code = "--debug" in argv, 0
    try:
        with until_the_reader_leaves():
            code = _dispatch([a for a in argv if a != "--debug"])
        return code
    except (UserError, ModuleNotFoundError) as error:
        if debug:
            raise
        return fail(not_installed(error) if isinstance(error, ModuleNotFoundError) else str(error))
    except KeyboardInterrupt:
        print("specsparse: stopped", file=sys.stderr)
        return 130


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS)) + 2
        lines = [f"  {name:<{width}}{text}" for name, text in COMMANDS.items()]
        last = "COMMAND --help shows its arguments; --debug shows a full traceback after an error."
        print("\n".join(["usage: python -m specsparse COMMAND [arguments]", "", *lines, "", last]))
        return 0
    name, rest = "version" if argv[0] == "--version" else argv[0], argv[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {name}; {hint}")
    if name == "run":  # Hydra has its own grammar
        from specsparse.run import main as run_main

        return run_main(rest)
    if name == "version":
        Parser(prog="specsparse version", description=COMMANDS[name]).parse_args(rest)
        try:
            version = metadata.version("specsparse")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        git = git_commit()
        commit = f" {git['commit'][:10]}{' with changes' if git['dirty'] else ''}" if git else ""
        print(f"specsparse {version}{commit}")
        return 0
    module = importlib.import_module(f"specsparse.{'tools' if name in TOOLS else 'cli'}.{name}")
    parser = Parser(prog=f"specsparse {name}", description=module.__doc__, allow_abbrev=False)
    module.add_arguments(parser)
    if name in REWRITING:
        rest = module.rewritten(rest)
    # Arguments may stand between options: argparse alone takes a second one for unknown then.
    parse = parser.parse_args if parser._subparsers else parser.parse_intermixed_args
    args = parse(rest)
    with hosts.joined(getattr(args, "distributed", None), argv):
        return int(module.main(args) or 0)
