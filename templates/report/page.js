"use strict";
// The page is complete without this script: it adds sorting, filtering, and opens what is folded before printing.
for (const table of document.querySelectorAll("table.sortable")) makeSortable(table);
for (const form of document.querySelectorAll("form.filters")) makeFilter(form);
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
addEventListener("resize", reachByKeyboard);
addEventListener("toggle", reachByKeyboard, true);
reachByKeyboard();

function reachByKeyboard() {
  for (const box of document.querySelectorAll(".scroll")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const each of heads) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      sortRows(table.tBodies[0], column, down ? -1 : 1);
    });
  });
}

function sortRows(body, column, sign) {
  const key = (row) => {
    const cell = row.cells[column];
    return cell.dataset.value ?? cell.textContent.trim();
  };
  const isEmpty = (text) => text === "" || text === "-";
  const keyed = [...body.rows].map((row) => [key(row), row]);
  keyed.sort(([a], [b]) => {
    // What was not measured stays below, whichever way the rest is sorted.
    if (isEmpty(a) || isEmpty(b)) return isEmpty(a) - isEmpty(b);
    const difference = Number(a) - Number(b);
    return sign * (Number.isNaN(difference) ? a.localeCompare(b, "en", { numeric: true }) : difference);
  });
  body.append(...keyed.map(([, row]) => row));
}

function makeFilter(form) {
  const rows = [...document.getElementById(form.dataset.table).tBodies[0].rows];
  const shown = form.querySelector("output");
  const apply = () => {
    let count = 0;
    for (const row of rows) {
      const fits = [...form.elements].every((field) => {
        if (!field.name || !field.value) return true;
        if (field.name === "text") return row.textContent.toLowerCase().includes(field.value.toLowerCase());
        return (row.dataset[field.name] ?? "").split("\n").includes(field.value);
      });
      row.hidden = !fits;
      count += fits;
    }
    shown.value = `${count} of ${rows.length}`;
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(apply));
  form.hidden = false;
  apply();
}
