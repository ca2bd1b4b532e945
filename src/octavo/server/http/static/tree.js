// The block tables of one request as a tree: one row per sequence, one column per logical block.
// Where sequences hold the same physical block, one box spans their rows.

function makeTree(svg) {
  const SPACE = "http://www.w3.org/2000/svg";
  const ROW = 22, LEFT = 34, WIDTH = 38;

  function element(name, attributes, text) {
    const made = document.createElementNS(SPACE, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    svg.append(made);
    return made;
  }

  // The sequences in their own order, except that those which share a block are placed together.
  function inOrder(sequences) {
    const first = new Map(); // column and block -> number of the first sequence with that block in that column
    sequences.forEach((sequence, number) => sequence.blocks.forEach((block, column) => {
      const key = `${column}:${block}`;
      if (!first.has(key)) first.set(key, number);
    }));
    const place = (number, column) => first.get(`${column}:${sequences[number].blocks[column]}`) ?? number;
    const longest = Math.max(0, ...sequences.map((sequence) => sequence.blocks.length));
    const numbers = sequences.map((_, number) => number).sort((a, b) => {
      for (let column = 0; column < longest; column++) {
        const difference = place(a, column) - place(b, column);
        if (difference) return difference;
      }
      return a - b;
    });
    return numbers.map((number) => sequences[number]);
  }

  // The boxes of a column: runs of rows with the same block.
  function runs(rows, column) {
    const found = [];
    rows.forEach((row, number) => {
      const block = row.blocks[column];
      const last = found[found.length - 1];
      if (block === undefined) return;
      if (last && last.block === block && last.end === number) last.end = number + 1;
      else found.push({ block, start: number, end: number + 1 });
    });
    return found;
  }

  // `sequences` is a list of {label, tokens, blocks}.
  function draw(sequences, blockSize, hue) {
    svg.replaceChildren();
    const rows = inOrder(sequences.filter((sequence) => sequence.blocks.length));
    svg.style.display = rows.length ? "block" : "none";
    if (!rows.length) return;
    const longest = Math.max(...rows.map((row) => row.blocks.length));
    const height = rows.length * ROW;
    svg.setAttribute("viewBox", `0 0 ${LEFT + longest * WIDTH} ${height}`);
    svg.setAttribute("width", LEFT + longest * WIDTH);
    svg.setAttribute("height", height);
    rows.forEach((row, number) => {
      element("text", { x: 0, y: number * ROW + 15, class: "tree-label" }, row.label);
    });
    let numBoxes = 0, numEntries = 0;
    for (let column = 0; column < longest; column++) {
      for (const run of runs(rows, column)) {
        const x = LEFT + column * WIDTH, y = run.start * ROW, sharers = run.end - run.start;
        const box = { x: x + 1, y: y + 1, width: WIDTH - 4, height: sharers * ROW - 3, rx: 5 };
        const filled = Math.max(...rows.slice(run.start, run.end).map(
          (row) => Math.min(1, Math.max(0, row.tokens / blockSize - column))));
        element("rect", { ...box, class: "tree-slots" });
        element("rect", {
          ...box, width: Math.max(6, box.width * filled), class: "tree-block",
          style: `--hue: ${hue}; --share: ${Math.min(1, (sharers - 1) / Math.max(1, rows.length - 1))}`,
        });
        element("text", { x: x + WIDTH / 2 - 1, y: y + (sharers * ROW) / 2 + 4, class: "tree-id" }, run.block);
        numBoxes += 1;
        numEntries += sharers;
      }
    }
    svg.setAttribute("aria-label",
      `${rows.length} sequences hold ${numBoxes} blocks; without sharing they would hold ${numEntries}`);
  }

  return { draw };
}
