// A click on a column name sorts the table; a second click reverses the order.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const column = head.cellIndex, up = head.getAttribute("aria-sort") === "descending";
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const isNumber = (text) => text !== "" && !Number.isNaN(Number(text));
    const order = (one, other) => {
      const a = key(one), b = key(other);
      if (isNumber(a) && isNumber(b)) return (up ? 1 : -1) * (a - b);
      if (isNumber(a) !== isNumber(b)) return isNumber(a) ? -1 : 1;
      return (up ? 1 : -1) * a.localeCompare(b);
    };
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...[...body.rows].sort(order));
  });
}
