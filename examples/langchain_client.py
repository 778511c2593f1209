"""LangChain with a server: `python examples/langchain_client.py URL MODEL`. It needs `pip install langchain-openai`."""

from __future__ import annotations

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main(url: str, model: str, api_key: str = "none") -> None:
    """Print the answers of a chain: whole, several at once, and as a stream."""
    chat = ChatOpenAI(
        base_url=f"{url}/v1", api_key=api_key, model=model, max_tokens=48, temperature=0,
        extra_body={"speculative_config": {"method": "ngram"}},
    )  # fmt: skip
    prompt = ChatPromptTemplate([("system", "Answer in one sentence."), ("user", "What is a {thing}?")])
    chain = prompt | chat | StrOutputParser()
    print("whole:", chain.invoke({"thing": "queue"}))
    for answer in chain.batch([{"thing": "stack"}, {"thing": "heap"}]):  # the server decodes them in one batch
        print("batch:", answer)
    print("stream: ", end="")
    for chunk in chain.stream({"thing": "queue"}):
        print(chunk, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
