/** The candidate that was probably meant: at most two edits away, or one that begins the same way. */
export function didYouMean(word: string, candidates: string[]): string | undefined {
  const near = candidates
    .map((candidate) => ({ candidate, edits: editDistance(word, candidate) }))
    .sort((a, b) => a.edits - b.edits)[0];
  if (near && near.edits <= 2) return near.candidate;
  return word.length < 3
    ? undefined
    : candidates.find((candidate) => candidate.startsWith(word) || word.startsWith(candidate));
}

function editDistance(a: string, b: string): number {
  let previous = Array.from({ length: b.length + 1 }, (_, j) => j);
  for (let i = 1; i <= a.length; i++) {
    const current = [i];
    for (let j = 1; j <= b.length; j++) {
      const replaced = (previous[j - 1] ?? 0) + (a[i - 1] === b[j - 1] ? 0 : 1);
      current.push(Math.min((previous[j] ?? 0) + 1, (current[j - 1] ?? 0) + 1, replaced));
    }
    previous = current;
  }
  return previous[b.length] ?? 0;
}
