import { join } from 'node:path';

/** The repository, seen from the compiled file. */
export const ROOT = join(__dirname, '..', '..', '..', '..');
export const PEERS_FOLDER = join(ROOT, 'apps', 'bench', 'peers');
export const DOCS_FOLDER = join(ROOT, 'docs');
