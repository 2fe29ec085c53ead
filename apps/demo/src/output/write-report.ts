import { access, constants, mkdir, writeFile } from 'node:fs/promises';
import { join, resolve } from 'node:path';
import { UsageError } from '../errors';
import type { RunDatabase } from '../run/database';
import type { Check, Summary } from '../run/verify';
import { type ReportedDocument, readDocuments } from './documents';
import { type Findings, findingsOf } from './findings';
import { reportText } from './report-text';

const NAMES = ['leasehold-report.json', 'leasehold-report.txt'];

/** Makes sure, before anything is started, that the report can be written. @throws UsageError */
export async function prepareReportFolder(folder: string): Promise<void> {
  try {
    await mkdir(folder).catch((error: NodeJS.ErrnoException) => {
      if (error.code !== 'EEXIST') throw error;
    });
    await access(folder, constants.W_OK);
    for (const name of NAMES) {
      await access(join(folder, name), constants.W_OK).catch((error: NodeJS.ErrnoException) => {
        if (error.code !== 'ENOENT') throw error;
      });
    }
  } catch (error) {
    const { message } = error as Error;
    throw new UsageError(
      `The report cannot be written to ${resolve(folder)} (${message}): name another with --report <folder>`,
    );
  }
}

/** @returns the paths of the two files */
export async function writeReport(
  database: RunDatabase,
  target: string,
  folder: string,
  summary: Summary,
  checks: Check[],
  /** One more check, which needs the findings. */
  checkFindings: (findings: Findings) => Check,
): Promise<{ paths: string[]; findings: Findings }> {
  const documents: ReportedDocument[] = [];
  for await (const document of readDocuments(database)) documents.push(document);
  const findings = findingsOf(documents);
  checks.push(checkFindings(findings));
  const paths = NAMES.map((name) => join(target, name));
  const [json = '', text = ''] = paths;
  await writeFile(json, `${JSON.stringify({ folder, summary, checks, ...findings, documents }, null, 1)}\n`);
  await writeFile(text, reportText(folder, summary, checks, findings));
  return { paths, findings };
}
