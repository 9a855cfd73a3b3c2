"use strict";
(() => {
const details = JSON.parse(document.getElementById("data").textContent);
const chosen = document.getElementById("chosen");

function line(name, text) {
  const p = document.createElement("p"), b = document.createElement("b");
  b.textContent = text;
  p.append(`${name}: `, b);
  return p;
}

function show(mark) {
  const found = details[Number(mark.dataset.point)];
  const value = document.createElement("div");
  value.className = "value";
  value.textContent = found.title;
  const parts = [value, ...found.lines.map(([name, text]) => line(name, text))];
  if (found.command) {
    const code = document.createElement("code");
    code.textContent = found.command;
    parts.push(code);
  }
  chosen.replaceChildren(...parts);
  for (const other of document.querySelectorAll("[data-point]")) other.classList.toggle("here", other === mark);
}

for (const mark of document.querySelectorAll("[data-point]")) {
  for (const event of ["pointerenter", "focus", "click"]) mark.addEventListener(event, () => show(mark));
}
})();
