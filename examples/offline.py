"""Continue a few prompts with the demo model, all in one batch."""

from octavo import LLM, SamplingParams

PROMPTS = [
    "Once upon a time there was a curious fox named Finn, who lived",
    "Translate English to German.\nThe old king gives the child a red ball. =>",
    "Anna lives in Oslo. Ben lives in Rome.\nQuestion: Where does Ben live?\nAnswer:",
]


def main() -> None:
    llm = LLM("demo")
    params = SamplingParams(temperature=0.8, max_tokens=60, seed=1)
    for output in llm.generate(PROMPTS, params):
        print(f"{output.prompt}\033[1m{output.outputs[0].text}\033[0m\n")


if __name__ == "__main__":
    main()
