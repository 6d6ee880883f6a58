"""Chat with a model by any method; on a terminal, colours tell where each token came from. /help lists the commands.

Arrow keys edit the line and find earlier ones, of earlier chats too; `/set temperature=0.7` changes how tokens are
chosen. Ctrl-C ends the answer, and at the prompt the chat. If the output is no terminal it is the answers alone. Each
line of a piped input is a message; with --prompt - all of it is one.
"""

import argparse
import sys

from specsparse.cli import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser, prompt=True)
    arguments.add_draft(parser.add_argument_group("drafts").add_argument)
    add = parser.add_argument
    add("--system", metavar="TEXT", help="a system message")
    add("-s", "--seed", type=int, default=0, help="seed of the noise; each answer adds one (%(default)s)")
    arguments.add_sampling(parser, temperature=0.0, max_tokens=256)


def main(args: argparse.Namespace) -> int:
    from specsparse.support import terminal
    from specsparse.tools.chat.conversation import Chat, ChatMethod, Conversation

    arguments.settle(args)
    sampling = arguments.sampling_params(args)
    drafter = arguments.drafter_of(args.drafter, args.draft, args.model).name
    method = ChatMethod(drafter, args.draft, args.verifier, args.gamma)
    method.spec(sampling).arguments()  # mistakes are said before the model is loaded
    out = terminal.console()
    model = arguments.load(args, out)
    system = [{"role": "system", "content": args.system}] if args.system else []
    talk = Conversation(model, sampling, seed=args.seed, messages=system)
    chat = Chat(talk, method, out, typed=args.prompt is None and sys.stdin.isatty())
    if args.prompt is None:
        chat.run()
    else:
        chat.answer(arguments.piped() if args.prompt == "-" else args.prompt)
    return 0
