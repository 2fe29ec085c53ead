import { chmodSync, cpSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { EmbeddedPostgresError, textOf } from './errors';
import { giveTo } from './ownership';
import { nativeFolder } from './platform-package';
import { run, type RunContext } from './run';
import { restoreSymlinks } from './symlinks';

/** Programs that the account which runs the server can start. */
export interface Binaries {
  initdb: string;
  postgres: string;
  /** `18` for 18.4; data of another major version cannot be opened. */
  majorVersion: string;
}

/**
 * The binaries where they were installed, or a copy in the work folder when the account cannot reach them there
 * (node_modules in a private home) or the symbolic links cannot be made there. The copy is 61 MB.
 */
export async function usableBinaries(
  context: RunContext,
  workFolder: string,
  installed = nativeFolder(),
): Promise<Binaries> {
  if (restoreSymlinks(installed)) {
    const found = await probe(installed, context);
    if (typeof found !== 'string') return found;
  }
  const copy = join(workFolder, 'native');
  cpSync(installed, copy, { recursive: true, verbatimSymlinks: true });
  makeWritable(copy);
  restoreSymlinks(copy);
  giveTo(copy, context.account);
  const found = await probe(copy, context);
  if (typeof found !== 'string') return found;
  throw new EmbeddedPostgresError(
    'BINARIES_UNUSABLE',
    `The embedded PostgreSQL does not run on this machine, neither from ${installed} nor from ${copy}: ` +
      'set DATABASE_URL to a PostgreSQL 14 or later, or TMPDIR to a folder where programs may run ' +
      `(the binaries need glibc on Linux).\n${found}`,
  );
}

/** A copy of a read-only folder is read-only too: no link could be made in it, and nobody could remove it. */
function makeWritable(folder: string): void {
  chmodSync(folder, 0o755);
  for (const entry of readdirSync(folder, { withFileTypes: true })) {
    if (entry.isDirectory()) makeWritable(join(folder, entry.name));
  }
}

/** The binaries in a folder when they run, else why they do not. */
async function probe(native: string, context: RunContext): Promise<Binaries | string> {
  const postgres = join(native, 'bin', 'postgres');
  const initdb = join(native, 'bin', 'initdb');
  try {
    const version = await run(postgres, ['--version'], context);
    await run(initdb, ['--version'], context);
    const majorVersion = /\)\s+(\d+)/.exec(version)?.[1];
    return majorVersion === undefined ? `${postgres} answers ${version}` : { initdb, postgres, majorVersion };
  } catch (error) {
    return textOf(error);
  }
}
