"""A short conversation: each turn finds the previous turns in the prefix cache."""

from octavo import LLM, SamplingParams

QUESTIONS = [
    "Who are you?",
    "Translate to German: The brave mouse saved the lion.",
    "And now tell me a story about a mouse and a star.",
]


def main() -> None:
    llm = LLM("demo")
    params = SamplingParams(temperature=0.7, max_tokens=400, seed=5)
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        [output] = llm.chat(messages, params, use_tqdm=False)
        answer = output.outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        print(f"you: {question}\ndemo ({output.num_cached_tokens} tokens cached): {answer}\n")


if __name__ == "__main__":
    main()
