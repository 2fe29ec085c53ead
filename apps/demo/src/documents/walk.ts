import type { Dirent } from 'node:fs';
import { readdir } from 'node:fs/promises';
import { extname, join } from 'node:path';

/** What a walk found. */
export interface Walk {
  /** Paths of the documents, relative to the folder, sorted. */
  files: string[];
  /** Files that are neither Markdown nor text. */
  others: number;
  /** Symbolic links, which are not followed: so no file is found twice, and a loop is none. */
  links: number;
  /** Folders that could not be read. */
  unreadable: string[];
}

const EXTENSIONS = new Set(['.md', '.markdown', '.mdx', '.txt', '.text', '.rst']);
const PLAIN_NAMES = /^(readme|license|licence|notice|copying|changelog|changes|history|authors|contributing)$/i;

export const isMarkdown = (path: string): boolean => /\.(md|mdx|markdown)$/i.test(path);

/** Whether a file is Markdown or text, by its name. */
export const isDocument = (name: string): boolean =>
  EXTENSIONS.has(extname(name).toLowerCase()) || PLAIN_NAMES.test(name);

/**
 * Finds the documents in a folder and below. Unreadable folders inside are counted, not fatal.
 * @throws the system's error if the folder itself cannot be read
 */
export async function walk(root: string, signal: AbortSignal): Promise<Walk> {
  const found: Walk = { files: [], others: 0, links: 0, unreadable: [] };
  const folders = [''];
  for (let folder = folders.pop(); folder !== undefined; folder = folders.pop()) {
    signal.throwIfAborted();
    for (const entry of await entriesOf(root, folder, found)) {
      const path = join(folder, entry.name);
      if (entry.isSymbolicLink()) found.links++;
      else if (entry.isDirectory()) {
        if (entry.name !== '.git') folders.push(path);
      } else if (entry.isFile() && isDocument(entry.name)) found.files.push(path);
      else found.others++;
    }
  }
  found.files.sort();
  return found;
}

async function entriesOf(root: string, folder: string, found: Walk): Promise<Dirent[]> {
  try {
    return await readdir(join(root, folder), { withFileTypes: true });
  } catch (error) {
    if (folder === '') throw error;
    found.unreadable.push(folder);
    return [];
  }
}
