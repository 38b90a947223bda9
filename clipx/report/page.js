"use strict";
// Sorting of tables by their headers. Numbers are compared as numbers, cells without a value come last.
for (const th of document.querySelectorAll("table.sort thead th")) th.onclick = () => {
  const body = th.closest("table").tBodies[0], i = th.cellIndex;
  const value = row => {
    const cell = row.cells[i], v = cell.dataset.v ?? cell.textContent.trim();
    return v === "" || v === "–" ? null : isNaN(v) ? v : +v;
  };
  const rows = [...body.rows].map(row => [value(row), row]);
  const numeric = rows.some(([v]) => typeof v === "number");
  const down = th.ariaSort ? th.ariaSort === "ascending" : numeric; // numbers: the highest first
  const compare = (a, b) => typeof a === typeof b ? (typeof a === "string" ? a.localeCompare(b) : a - b)
    : typeof a === "number" ? 1 : -1;
  rows.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null) : (down ? -1 : 1) * compare(a, b));
  for (const other of th.parentNode.cells) other.ariaSort = other === th ? (down ? "descending" : "ascending") : null;
  body.append(...rows.map(([, row]) => row));
};

// Copy buttons of commands. A page opened as a file may have no clipboard: then the text is selected.
for (const place of document.querySelectorAll(".copy")) {
  const button = document.createElement("button"), pre = place.querySelector("pre");
  button.type = "button";
  button.textContent = "copy";
  button.onclick = async () => {
    getSelection().selectAllChildren(pre);
    button.textContent = await navigator.clipboard?.writeText(pre.textContent).then(() => "copied", () => "selected") ?? "selected";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  };
  place.append(button);
}
