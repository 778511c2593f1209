// Elements of the page, made without HTML texts: nothing that a model writes is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Return the element of the page with this id. */
export const byId = (id) => document.getElementById(id);

/** Return a new element. Attributes that are null are left out; children are elements or texts. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Return a new element of a drawing, as `element` does. */
export function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value != null) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Return a token's text with visible white space, at most `most` characters long. */
export function visible(text, most = 16) {
  const shown = text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍");
  const characters = [...shown];
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : shown;
}
