"""Translate with four beams, which share the KV blocks of their common prefixes."""

from octavo import LLM, BeamSearchParams

SENTENCES = [
    "The girl who found the small ring wants to show the king the castle.",
    "Because the wolf is hungry, it runs through the dark forest.",
]


def main() -> None:
    llm = LLM("demo")
    prompts = [f"Translate English to German.\n{sentence} =>" for sentence in SENTENCES]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=48))
    for sentence, output in zip(SENTENCES, outputs, strict=True):
        print(f"\n{sentence}")
        for beam in output.outputs:
            print(f"  {beam.score:8.4f} {beam.text}")


if __name__ == "__main__":
    main()
