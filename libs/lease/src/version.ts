import { readFileSync } from 'node:fs';
import { join } from 'node:path';

/** This package's version, as the registry shows it. */
export const VERSION = (JSON.parse(readFileSync(join(__dirname, '..', 'package.json'), 'utf8')) as { version: string })
  .version;
