import type { ReportedDocument } from './documents';

/** What the report says about the files as a whole. */
export interface Findings {
  totals: {
    bytes: number;
    lines: number;
    words: number;
    headings: number;
    links: number;
    brokenLinks: number;
    truncated: number;
  };
  largest: { path: string; bytes: number }[];
  mostWords: { path: string; words: number }[];
  codeLanguages: Record<string, number>;
  scripts: Record<string, number>;
  encodings: Record<string, number>;
  brokenLinks: { path: string; line: number; target: string }[];
  /** Files with the same content: the most repeated. */
  duplicates: { copies: number; path: string }[];
  /** Files that are no text, or could not be read. */
  failures: { path: string; reason: string }[];
  /** Files that each worker indexed. */
  workers: Record<string, number>;
}

const TOP = 10;

export function findingsOf(documents: ReportedDocument[]): Findings {
  const totals = { bytes: 0, lines: 0, words: 0, headings: 0, links: 0, brokenLinks: 0, truncated: 0 };
  const tallies = { codeLanguages: new Map(), scripts: new Map(), encodings: new Map(), workers: new Map() } as Record<
    'codeLanguages' | 'scripts' | 'encodings' | 'workers',
    Map<string, number>
  >;
  const copies = new Map<string, { copies: number; path: string }>();
  const brokenLinks: Findings['brokenLinks'] = [];
  const failures: Findings['failures'] = [];
  for (const { path, index, reason, worker } of documents) {
    if (!index) {
      failures.push({ path, reason: reason ?? 'unknown' });
      continue;
    }
    totals.bytes += index.bytes;
    totals.lines += index.lines;
    totals.words += index.words;
    totals.headings += index.headings;
    totals.links += index.links.external + index.links.relative + index.links.anchors;
    totals.brokenLinks += index.links.brokenCount;
    if (index.truncated) totals.truncated++;
    add(tallies.codeLanguages, index.codeLanguages);
    add(tallies.scripts, index.scripts);
    add(tallies.encodings, { [index.encoding]: 1 });
    add(tallies.workers, { [worker]: 1 });
    for (const { line, target } of index.links.broken) brokenLinks.push({ path, line, target });
    const same = copies.get(index.sha256);
    if (same) same.copies++;
    else copies.set(index.sha256, { copies: 1, path });
  }
  const indexed = documents.flatMap(({ path, index }) =>
    index ? [{ path, bytes: index.bytes, words: index.words }] : [],
  );
  return {
    totals,
    largest: top(indexed, ({ bytes }) => bytes).map(({ path, bytes }) => ({ path, bytes })),
    mostWords: top(indexed, ({ words }) => words).map(({ path, words }) => ({ path, words })),
    codeLanguages: sorted(tallies.codeLanguages),
    scripts: sorted(tallies.scripts),
    encodings: sorted(tallies.encodings),
    brokenLinks,
    duplicates: top(
      [...copies.values()].filter((group) => group.copies > 1),
      (group) => group.copies,
    ),
    failures,
    workers: Object.fromEntries([...tallies.workers].sort(([a], [b]) => a.localeCompare(b, 'en', { numeric: true }))),
  };
}

function add(tally: Map<string, number>, counts: Record<string, number>): void {
  for (const [key, count] of Object.entries(counts)) tally.set(key, (tally.get(key) ?? 0) + count);
}

const top = <T>(items: T[], size: (item: T) => number): T[] => items.sort((a, b) => size(b) - size(a)).slice(0, TOP);

const sorted = (tally: Map<string, number>): Record<string, number> =>
  Object.fromEntries([...tally].sort(([, a], [, b]) => b - a));
