// Where answers come from: the server, or the data inside an exported file.

const element = document.getElementById('exported');
const exported = element ? JSON.parse(element.textContent) : null;

/** How an exported file was made (`rule`, `made`), or null. */
export const exportedFrom = exported ? exported.about : null;

/** Path of an answer, with those parameters that have a value, in alphabetical order. */
export function pathOf(path, parameters = {}) {
  const known = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== '');
  const query = new URLSearchParams(known.sort(([a], [b]) => (a < b ? -1 : 1)));
  return known.length ? `${path}?${query}` : path;
}

/** The answer to a question, as data. Throws an Error that says what is wrong. */
export async function ask(path, parameters = {}) {
  const address = pathOf(path, parameters);
  if (exported) {
    // Of curves and lists there is one answer, which is all that the file has.
    const found = exported.answers[address] ?? exported.answers[pathOf(path, {source: parameters.source})];
    if (found !== undefined) return structuredClone(found);
    throw new Error('This is not part of the exported file. The command `view` shows it on the machine of the run.');
  }
  let response;
  try {
    response = await fetch(address, {cache: 'no-store'});
  } catch {
    throw new Error('The server does not answer. Start `python -m pipelinerl view` again.');
  }
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}
