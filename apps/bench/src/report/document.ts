import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { CASES } from '../cases';
import { BenchError, messageOf } from '../errors';
import type { Results } from '../results';
import { chartOf } from './chart';
import { markdownOf } from './markdown';

const NAME = 'benchmarks';

/** @throws BenchError when the file is none of ours */
export function readResults(path: string): Results {
  try {
    const results = JSON.parse(readFileSync(path, 'utf8')) as Results;
    if (!Array.isArray(results.cases) || !Array.isArray(results.commands)) throw new Error('it holds no results');
    return results;
  } catch (error) {
    throw new BenchError(`${path} cannot be read as raw results of a benchmark: ${messageOf(error)}`, { cause: error });
  }
}

/** Writes the document, its chart and the raw results that both are made of. @returns the paths */
export function writeDocument(results: Results, folder: string): string[] {
  const path = (extension: string): string => join(folder, `${NAME}.${extension}`);
  writeFileSync(path('json'), `${JSON.stringify(results, null, 1)}\n`);
  writeFileSync(path('svg'), chartOf(results));
  writeFileSync(path('md'), markdownOf(results, `${NAME}.svg`));
  return ['md', 'svg', 'json'].map(path);
}

/**
 * Adds the cases that the last document has and this run has not, so that the long ones need not be run every time. Only out of the same
 * circumstances: another machine, version or size begins anew.
 */
export function withFormerCases(results: Results, folder: string): Results {
  const path = join(folder, `${NAME}.json`);
  if (!existsSync(path)) return results;
  const former = readResults(path);
  if (circumstances(former) !== circumstances(results)) return results;
  const fresh = new Set(results.cases.map((one) => one.case));
  const order = CASES.map(({ name }) => name);
  return {
    ...results,
    commands: [...new Set([...former.commands, ...results.commands])],
    contenders: { ...former.contenders, ...results.contenders },
    skipped: { ...former.skipped, ...results.skipped },
    cases: [...former.cases.filter((one) => !fresh.has(one.case)), ...results.cases].sort(
      (a, b) => order.indexOf(a.case) - order.indexOf(b.case),
    ),
  };
}

function circumstances({ quick, scale, machine, versions, postgresSettings, contenders }: Results): string {
  const { node, postgres } = versions;
  return JSON.stringify([quick, scale, machine, node, postgres, postgresSettings, contenders.ours?.version]);
}
