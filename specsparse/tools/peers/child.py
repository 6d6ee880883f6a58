"""What a peer's process answers: requests and replies, one JSON object a line.

Imported by the scripts beside it, which run with any interpreter that has the peer; nothing of specsparse is imported.
"""

import json
import os
import sys
import time


def serve(hello, engine_of) -> None:
    """Answers until the input ends.

    Args:
        hello: says version and instruction sets.
        engine_of: opens an engine with the keywords of an "open" request; its methods answer the other requests, with
            seconds or with a whole reply.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no reply
    engine = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            do = request.pop("do")
            if do == "hello":
                reply = hello()
            elif do == "open":
                start = time.perf_counter()
                engine = engine_of(**request)
                reply = {"seconds": time.perf_counter() - start}
            else:
                reply = getattr(engine, do)(**request)
                reply = reply if isinstance(reply, dict) else {"seconds": reply}
        except ImportError as error:
            reply = {"missing": str(error)}
        except Exception as error:  # the parent says it
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
