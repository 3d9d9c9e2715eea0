"""Answers a question from documents, with citations: python assistant.py FOLDER QUESTION"""

import sys
from pathlib import Path

from headrace import LocalGateway

CONFIG = Path(__file__).with_name("headrace.toml")


def main(folder: str, question: str) -> None:
    with LocalGateway(CONFIG) as gateway:
        gateway.collection("docs").add([folder])
        for event in gateway.pipeline("docs").stream(question):
            if event.name == "text":
                print(event.data["text"], end="", flush=True)
            elif event.name == "done":
                cited = {citation["number"] for citation in event.data["citations"]}
                print()
                for source in event.data["sources"]:
                    if source["number"] in cited:
                        print(f"[{source['number']}] {source['source']}: {source.get('heading', '')}")


if __name__ == "__main__":
    main(*sys.argv[1:])
