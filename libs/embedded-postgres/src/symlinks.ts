import { lstatSync, readFileSync, symlinkSync } from 'node:fs';
import { basename, dirname, join, relative } from 'node:path';
import { errnoOf } from './errors';

interface Link {
  source: string;
  target: string;
}

/**
 * Makes the symbolic links between the shared libraries. npm packs none, and the package's own install script is
 * skipped under `--ignore-scripts`. Returns false where they cannot be made: a read-only node_modules.
 */
export function restoreSymlinks(native: string): boolean {
  for (const { source, target } of readLinks(native)) {
    const link = join(native, relative('native', target));
    if (exists(link)) continue;
    try {
      symlinkSync(join(relative(dirname(target), dirname(source)), basename(source)), link);
    } catch (error) {
      const code = errnoOf(error);
      if (code === 'EACCES' || code === 'EPERM' || code === 'EROFS') return false;
      if (code !== 'EEXIST') throw error;
    }
  }
  return true;
}

function readLinks(native: string): Link[] {
  const file = join(native, 'pg-symlinks.json');
  return exists(file) ? (JSON.parse(readFileSync(file, 'utf8')) as Link[]) : [];
}

function exists(path: string): boolean {
  return lstatSync(path, { throwIfNoEntry: false }) !== undefined;
}
