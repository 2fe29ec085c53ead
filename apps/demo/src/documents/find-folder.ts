import { existsSync } from 'node:fs';
import { realpath, stat } from 'node:fs/promises';
import { dirname, join, resolve } from 'node:path';
import { UsageError } from '../errors';
import { type Walk, walk } from './walk';

/** Finds the documents to index. @throws UsageError that says what is wrong with the folder */
export async function findDocuments(wanted: string | undefined, signal: AbortSignal): Promise<Walk & { root: string }> {
  const folder = wanted === undefined ? installedModules() : resolve(wanted);
  try {
    if (!(await stat(folder)).isDirectory()) {
      throw new UsageError(`${folder} is no folder: name the folder that it is in`);
    }
    const root = await realpath(folder);
    const found = await walk(root, signal);
    if (found.files.length === 0) {
      const why = found.others > 0 ? `only ${found.others} other files` : 'it is empty';
      throw new UsageError(`There is no Markdown or text file in ${folder}: ${why}`);
    }
    return { ...found, root };
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    if (code === 'ENOENT' || code === 'ENOTDIR') throw new UsageError(`There is no folder ${folder}`);
    if (code === 'EACCES' || code === 'EPERM')
      throw new UsageError(`The folder ${folder} cannot be read: permission denied`);
    throw error;
  }
}

/** The node_modules nearest to this program. */
function installedModules(): string {
  for (let folder = __dirname; ; folder = dirname(folder)) {
    const modules = join(folder, 'node_modules');
    if (existsSync(modules)) return modules;
    if (folder === dirname(folder)) throw new UsageError('No node_modules is installed here: name a folder to index');
  }
}
