import { access } from 'node:fs/promises';
import { dirname, resolve } from 'node:path';
import type { Link } from './markdown';

export interface LinkFacts {
  external: number;
  /** Into the same document. */
  anchors: number;
  relative: number;
  /** Relative ones that lead to nothing: at most {@link MAX_BROKEN} are listed, all are counted. */
  broken: Link[];
  brokenCount: number;
}

const MAX_BROKEN = 50;
/** Different targets of one document that are looked for. */
const MAX_LOOKED_FOR = 1000;

/** Counts a document's links and looks for what the relative ones lead to. */
export async function checkLinks(file: string, links: Link[]): Promise<LinkFacts> {
  const facts: LinkFacts = { external: 0, anchors: 0, relative: 0, broken: [], brokenCount: 0 };
  const seen = new Map<string, boolean>();
  for (const link of links) {
    if (link.target.startsWith('#')) facts.anchors++;
    // From "/" on it is the site's or the repository's root that counts, which nobody here knows.
    else if (/^(?:[a-z][a-z\d+.-]*:|\/|\\)/i.test(link.target)) facts.external++;
    else {
      facts.relative++;
      const path = pathOf(file, link.target);
      if (!seen.has(path) && seen.size < MAX_LOOKED_FOR) seen.set(path, await exists(path));
      if (seen.get(path) !== false) continue;
      facts.brokenCount++;
      if (facts.broken.length < MAX_BROKEN) facts.broken.push({ ...link, target: link.target.slice(0, 300) });
    }
  }
  return facts;
}

function pathOf(file: string, target: string): string {
  const [bare = ''] = target.split(/[?#]/, 1);
  try {
    return resolve(dirname(file), decodeURIComponent(bare));
  } catch {
    return resolve(dirname(file), bare);
  }
}

const exists = (path: string): Promise<boolean> =>
  access(path).then(
    () => true,
    (error: NodeJS.ErrnoException) => error.code === 'EACCES',
  );
