"""Four stories from one opening: the prompt's KV blocks are computed once and shared by all."""

from octavo import LLM, SamplingParams

OPENING = (
    "It was a stormy evening in the old harbour town. Lena, a young sailor, had just woken up. "
    "Her best friend was a small dragon named Otto."
)


def main() -> None:
    llm = LLM("demo")
    params = SamplingParams(n=4, temperature=1.0, max_tokens=60, seed=3)
    [output] = llm.generate(OPENING, params)
    print(OPENING)
    for sample in output.outputs:
        print(f"\n{sample.index + 1}.{sample.text} ...")


if __name__ == "__main__":
    main()
